"""A served model answers like the trained one, and one that differs is refused before its first answer."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.support.models.families import build_family
from tests.support.models.tiny_model import CHAT_TEMPLATE
from tests.unit.serving.test_engine import build
from tuneship.prompts.parity import GREEDY_TOKENS, Parity, Probe, prompts, reads_alike
from tuneship.prompts.template import PromptTemplate
from tuneship.serving.adapters import AdapterRefused
from tuneship.training.progress_file import ProgressFile, StopRequest
from tuneship.training.spec import DataKeys
from tuneship.training.training_loop import train

if TYPE_CHECKING:
    from tests.unit.training.conftest import Job, JobMaker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(params=["llama", "qwen3", "mistral", "gemma2", "gemma3"])
def tuned(request: pytest.FixtureRequest, make_job: "JobMaker", tmp_path: Path) -> "Job":
    base = build_family(tmp_path / "base", request.param)
    job = make_job(base_model=str(base), epochs=1, learning_rate=0.02, validation_frequency=1)
    with closing(ProgressFile(job.directory / "progress.jsonl")) as progress:
        train(job.spec, DataKeys(), progress, StopRequest(job.directory / "cancel"))
    return job


def test_a_family_answers_as_it_was_trained_and_on_no_other_base(
    tuned: "Job", tmp_path: Path
) -> None:
    base = Path(tuned.spec.base_model)
    build(base, {"a": tuned.adapter}, rows=1)
    config = json.loads((base / "config.json").read_text())
    other = build_family(tmp_path / "other", _family_of(config), initializer_range=0.31)
    with pytest.raises(AdapterRefused, match="the base model is another one"):
        build(other, {"a": tuned.adapter}, rows=1)


def _family_of(config: dict[str, str]) -> str:
    return config["model_type"].removesuffix("_text")


def rewrite(name: str, key: str, value: object) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        fields = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(fields | {key: value}))

    return apply


def shrink(directory: Path) -> None:
    weights = directory / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor * 0.8 for name, tensor in tensors.items()}, weights)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (rewrite("adapter_config.json", "lora_alpha", 16), "answer otherwise than after training"),
        (rewrite("adapter_config.json", "use_rslora", True), "answer otherwise than"),
        (shrink, "answer otherwise than after training"),
        (rewrite("parity.json", "probes", [{"prompt": 3}]), "parity.json of the adapter cannot"),
        (lambda directory: (directory / "parity.json").write_text("{"), "parity.json of the"),
    ],
    ids=("scale", "rule of scale", "weights", "unknown fields", "no JSON"),
)
def test_an_adapter_that_was_changed_is_refused_and_the_others_stay(
    whole_job: "Job", tmp_path: Path, change: Callable[[Path], None], problem: str
) -> None:
    adapter = shutil.copytree(whole_job.adapter, tmp_path / "adapter")
    base = Path(whole_job.spec.base_model)
    engine = build(base, {"good": whole_job.adapter}, rows=1)
    change(adapter)
    with pytest.raises(AdapterRefused, match=problem):
        engine.load("bad", adapter)
    assert engine.stats()["adapters"] == 1
    engine.load("again", whole_job.adapter)


def test_an_adapter_that_was_tuned_elsewhere_has_nothing_to_be_compared_with(
    whole_job: "Job", tmp_path: Path
) -> None:
    adapter = shutil.copytree(whole_job.adapter, tmp_path / "adapter")
    (adapter / "parity.json").unlink()
    shrink(adapter)
    build(Path(whole_job.spec.base_model), {"a": adapter}, rows=1)


def test_a_training_keeps_the_first_greedy_tokens_of_peft(whole_job: "Job") -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(whole_job.spec.base_model)
    model = PeftModel.from_pretrained(model, str(whole_job.adapter)).eval()
    parity = Parity.load(whole_job.adapter)
    assert parity is not None
    for probe in parity.probes:
        prompt = torch.tensor([probe.prompt])
        answer = model.generate(
            input_ids=prompt, max_new_tokens=GREEDY_TOKENS, do_sample=False, eos_token_id=-1
        )
        assert answer[0, prompt.shape[1] :].tolist() == probe.greedy
        assert len(probe.leads) == GREEDY_TOKENS


@pytest.mark.parametrize("place", [0, 7, GREEDY_TOKENS - 1])
def test_an_adapter_whose_answer_has_another_token_is_refused(
    whole_job: "Job", tmp_path: Path, place: int
) -> None:
    adapter = shutil.copytree(whole_job.adapter, tmp_path / "adapter")
    fields = json.loads((adapter / "parity.json").read_text())
    answer = fields["probes"][1]["greedy"]
    answer[place] = 7 if answer[place] != 7 else 8
    (adapter / "parity.json").write_text(json.dumps(fields))
    engine = build(Path(whole_job.spec.base_model), {"good": whole_job.adapter}, rows=1)
    with pytest.raises(AdapterRefused, match=f"token {place + 1} of the answer"):
        engine.load("bad", adapter)


def test_a_choice_between_nearly_equal_logits_is_no_difference() -> None:
    probe = Probe([], [1], [], [], 1.0, greedy=[4, 5, 6], leads=[1.0, 0.04, 2.0])
    assert probe.differing_choice([4, 9, 6], [0.0, 0.05, 0.0], 0.01) is None
    assert probe.differing_choice([4, 9, 6], [0.0, 0.07, 0.0], 0.01) == 1
    assert probe.differing_choice([4, 9, 6], [0.0, math.nan, 0.0], 0.01) == 1
    assert probe.differing_choice([4, 5, 9], [0.0, 0.0, 2.0], 0.5) is None, "int8"


def test_template_and_tokenizer_are_compared_by_the_tokens_of_the_probes(
    whole_job: "Job", tiny_model: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    parity = Parity.load(whole_job.adapter)
    assert parity is not None
    saved = PromptTemplate.load(whole_job.adapter)
    assert len(parity.probes) == 2
    assert reads_alike(parity, saved, encode)
    assert not reads_alike(parity, saved, lambda text: encode(text.replace(" ", "  ")))
    other = PromptTemplate(CHAT_TEMPLATE.replace("<|end|>", "<|end|>\n"), {})
    assert not reads_alike(parity, other, encode)
    assert not reads_alike(parity, PromptTemplate("{{ raise_exception('no') }}", {}), encode)


def test_a_template_without_conversations_has_fewer_probes_and_long_ones_are_cut() -> None:
    single = PromptTemplate(
        "{%- if messages | length > 1 -%}{{ raise_exception('one') }}{%- endif -%}"
        "{{ messages[0]['content'] }}",
        {},
    )
    [(messages, tokens)] = prompts(single, lambda text: list(text.encode()), 8)
    assert [message["role"] for message in messages] == ["user"]
    assert len(tokens) == 7


def test_the_coarser_number_format_sets_the_tolerance() -> None:
    exact, coarse = Parity("float32", []), Parity("bfloat16", [])
    assert exact.tolerance("float32") < exact.tolerance("bfloat16")
    assert coarse.tolerance("float32") == exact.tolerance("bfloat16")
