"""lm-evaluation-harness, in an environment of its own, scores and asks the shipped model through OpenAI's API.

The log probabilities of its multiple-choice task are compared with those of transformers' own forward pass.
"""

import json
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.processes import Serve
from tuneship.service.catalogues.base_models import Catalogue

pytestmark = [pytest.mark.soak, pytest.mark.long]

PROGRAM = ("lm-eval[api]==0.4.13", "transformers")
ROOT = Path(__file__).parents[2]
BASE = Catalogue().default
QUESTIONS = [
    ("Senile cataract is a disease of the", ["eye", "ear and mastoid process", "skin"]),
    ("Chronic eczema is a disease of the", ["nervous system", "skin"]),
    ("Acute bronchitis is a disease of the", ["respiratory system", "blood", "eye"]),
]
CHOICE_TASK = """
task: chapters_by_choice
dataset_path: json
dataset_kwargs: {data_files: {test: LINES}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
TEXT_TASK = """
task: chapters_by_text
dataset_path: json
dataset_kwargs: {data_files: {test: LINES}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the program; return its command."""
    folder = tmp_path_factory.mktemp("lm-eval") / "env"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *PROGRAM]
    constraints = ["-c", ROOT / "constraints.txt"]
    subprocess.run([*command, *constraints], check=True, timeout=1800)
    return folder / "bin" / "lm_eval"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    service = Serve(tmp_path_factory.mktemp("served") / "data")
    yield service
    service.kill()
    service.process.wait(60)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = folder / "lines.jsonl"
    rows = [{"question": question, "choices": choices} for question, choices in QUESTIONS]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("choice", CHOICE_TASK), ("text", TEXT_TASK)):
        (folder / f"{name}.yaml").write_text(task.replace("LINES", str(lines)))
    return folder


def evaluate(
    harness: Path, served: Serve, tasks: Path, model: str, task: str, *options: str, **more: str
) -> list[dict[str, Any]]:
    """Run the program and return what it kept of each line, in their order."""
    path = "chat/completions" if "chat" in model else "completions"
    arguments = {
        "base_url": f"{served.url}/openai/v1/{path}",
        "model": BASE.id,
        "num_concurrent": "1",
        **more,
    }
    written = ",".join(f"{name}={value}" for name, value in arguments.items())
    output = tasks / "output"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "cache")}
    command = [harness, "--model", model, "--model_args", written, "--include_path", tasks]
    command += ["--tasks", task, "--output_path", output, "--log_samples", *options]
    run = subprocess.run(
        command,
        env=served.openai_variables() | offline,
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (samples,) = output.rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    return sorted(found, key=lambda sample: sample["doc_id"])


def reference(question: str, choice: str) -> tuple[float, bool]:
    """The log probability of a choice behind a question, and whether greedy decoding gives it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(BASE.path)
    model: Any = AutoModelForCausalLM.from_pretrained(BASE.path, dtype=torch.float32)
    before = tokenizer(question)["input_ids"]
    ids = tokenizer(f"{question} {choice}")["input_ids"]
    with torch.inference_mode():
        logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    rows = logprobs[len(before) - 1 : -1]
    own = torch.tensor(ids[len(before) :])
    total = float(rows.gather(-1, own[:, None]).sum())
    return total, bool((rows.argmax(-1) == own).all())


def test_a_multiple_choice_task_gets_the_models_own_log_probabilities(
    harness: Path, served: Serve, tasks: Path
) -> None:
    more = {"tokenizer": str(BASE.path), "tokenizer_backend": "huggingface", "max_length": "512"}
    samples = evaluate(harness, served, tasks, "local-completions", "chapters_by_choice", **more)
    assert len(samples) == len(QUESTIONS)
    for (question, choices), sample in zip(QUESTIONS, samples, strict=True):
        found = [(float(value), greedy == "True") for value, greedy in sample["filtered_resps"]]
        expected = [reference(question, choice) for choice in choices]
        assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], abs=1e-3)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        best = max(range(len(choices)), key=lambda number: expected[number][0])
        assert sample["acc"] == float(best == 0)


@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_a_generation_task_is_answered(
    harness: Path, served: Serve, tasks: Path, model: str
) -> None:
    options = ("--apply_chat_template",) if "chat" in model else ()
    more = {"tokenizer": str(BASE.path), "tokenizer_backend": "huggingface"}
    samples = evaluate(
        harness,
        served,
        tasks,
        model,
        "chapters_by_text",
        *options,
        **({} if "chat" in model else more),
    )
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        (answer,) = sample["filtered_resps"]
        assert isinstance(answer, str)
        assert "\n" not in answer
