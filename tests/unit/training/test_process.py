"""The training process as a whole, started as the service starts it."""

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import until
from tuneship.training.__main__ import NICENESS
from tuneship.training.progress_file import POLL_SECONDS

if TYPE_CHECKING:
    from tests.unit.training.conftest import Job, JobMaker

pytestmark = [pytest.mark.slow, pytest.mark.long]

DIE_AT_RENAME = """
import os, pathlib, signal
count = 0
def rename(self, target, real=pathlib.Path.rename):
    global count
    count += 1
    if count == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, target)
pathlib.Path.rename = rename
"""
DIE_AT_STEP = """
import os, signal
from tuneship.training.learner import Learner
from tuneship.training.objective import SupervisedFineTuning
learn = Learner.learn
def dying(self, batches, tokens, *, step, rate):
    loss = learn(self, batches, tokens, step=step, rate=rate)
    if step == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss
Learner.learn = dying
"""

# Program that never writes its first progress line ("all is loaded"), so that it loads until it is ended.
STAY_WHEN_LOADED = """
import time
from tuneship.training.progress_file import ProgressFile
ProgressFile.write = lambda *_, **__: time.sleep(3600)
"""


def wait_for_step(job: "Job", step: int) -> None:
    until(lambda: any(line["step"] >= step for line in job.of_kind("step")))


def test_training_lowers_the_loss_and_writes_an_adapter_that_peft_loads(
    make_job: "JobMaker", tiny_model: Path
) -> None:
    job = make_job(epochs=6)
    assert job.run() == 0

    started, completed = job.lines()[0], job.lines()[-1]
    steps = job.of_kind("step")
    assert (started["kind"], started["total_steps"], started["resumed_from_step"]) == (
        "started",
        36,
        0,
    )
    assert (started["training_examples"], started["validation_examples"]) == (48, 12)
    assert [line["step"] for line in steps] == list(range(1, 37))
    assert steps[-1]["epoch"] == 6
    assert [line["current_epoch"] for line in steps[5:7]] == [1, 2]
    assert completed["validation_loss"] < 0.5 * steps[0]["validation_loss"]
    assert steps[-1]["perplexity"] == math.exp(steps[-1]["validation_loss"])
    assert [line["step"] for line in steps if line["evaluated"]] == [1, *range(3, 37, 3)]
    assert [line["epoch"] for line in job.of_kind("epoch")] == [1, 2, 3, 4, 5, 6]
    assert completed["adapter_dir"] == str(job.adapter)

    assert sorted(path.name for path in job.adapter.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "parity.json",
        "special_tokens_map.json",
    ]
    assert (job.adapter / "chat_template.jinja").read_text() == (
        tiny_model / "chat_template.jinja"
    ).read_text()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_adapter_is_the_checkpoint_with_the_lowest_validation_loss(
    make_job: "JobMaker", tiny_model: Path, tmp_path: Path
) -> None:
    """Measured again with plain peft, the shipped adapter has the loss that the last line reports."""
    import numpy as np
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.unit.training.conftest import write_rows
    from tuneship.prompts.template import PromptTemplate
    from tuneship.prompts.text_format import ModelTextFormat
    from tuneship.prompts.text_tokenizer import load_tokenizer
    from tuneship.training.examples.batches import collate
    from tuneship.training.examples.data_files import read_rows
    from tuneship.training.examples.tokenized_examples import Encoder
    from tuneship.training.objective import SupervisedFineTuning

    # Measure with wrong answers: the loss falls while the form of an answer is learnt, then rises.
    wrong = write_rows(tmp_path / "wrong.jsonl", 12, shift=3)
    job = make_job(epochs=12, validation_file=wrong, validation_frequency=6)
    assert job.run() == 0
    measured = {
        line["step"]: line["validation_loss"] for line in job.of_kind("step") if line["evaluated"]
    }
    completed = job.lines()[-1]
    best_step = min(list(measured)[1:], key=measured.__getitem__)
    assert completed["best_step"] == best_step
    assert 6 < best_step < 72, "the last checkpoint was the best, so this test would show nothing"

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    vocabulary = base.config.vocab_size
    model = PeftModel.from_pretrained(base, job.adapter)
    text_format = ModelTextFormat.of_base(tiny_model, load_tokenizer(tiny_model))
    own_format = text_format.with_template(PromptTemplate.load(job.adapter))
    encoder = Encoder(own_format, context_length=256, vocabulary=vocabulary)
    rows = read_rows(
        job.spec.validation_file or Path(), "instruction", encoder, SupervisedFineTuning()
    ).rows
    batch = collate(rows, np.arange(len(rows)))
    labels = torch.full(batch.tokens.shape, -100)
    labels.view(-1)[torch.from_numpy(batch.logit_positions + 1)] = torch.from_numpy(batch.targets)
    with torch.inference_mode():
        loss = model(input_ids=torch.from_numpy(batch.tokens), labels=labels).loss.item()
    assert loss == pytest.approx(completed["validation_loss"], rel=1e-4)


@pytest.mark.soak  # `test_resume.py` kills in the test's own process
@pytest.mark.parametrize(
    "fault",
    [DIE_AT_RENAME.format(number=3), DIE_AT_RENAME.format(number=5)],
    ids=["while a later checkpoint is written", "while the adapter is written"],
)
def test_a_killed_training_resumes_to_the_same_bits(
    make_job: "JobMaker", whole_job: "Job", fault: str
) -> None:
    job = make_job()
    assert job.run(fault) == -signal.SIGKILL
    assert not job.adapter.exists()

    assert job.run() == 0
    assert job.weights() == whole_job.weights()
    last = {line["step"]: line for line in job.of_kind("step")}
    assert list(last.values()) == whole_job.of_kind("step")
    assert job.of_kind("epoch")[-1] == whole_job.of_kind("epoch")[-1]


@pytest.mark.soak
def test_a_training_killed_again_and_again_ends_with_the_same_bits(
    make_job: "JobMaker", whole_job: "Job"
) -> None:
    """The kills come from outside at no chosen moment. `test_resume.py` tries chosen lines of the training."""
    job = make_job()
    for step in (1, 5, 9):
        process = job.start()
        wait_for_step(job, step)
        process.kill()
        process.wait()
    assert job.run() == 0
    assert job.weights() == whole_job.weights()
    last = {line["step"]: line for line in job.of_kind("step")}
    assert list(last.values()) == whole_job.of_kind("step")


def test_a_resume_begins_at_the_last_complete_checkpoint(make_job: "JobMaker") -> None:
    job = make_job()
    job.run(DIE_AT_STEP.format(number=8))
    newest = max(job.spec.checkpoint_dir.glob("step-*"))
    (newest / "tensors.safetensors").write_bytes(b"damaged")
    assert job.run() == 0
    assert [line["resumed_from_step"] for line in job.of_kind("started")] == [0, 3]


def test_a_cancel_file_ends_the_training_with_one_line(make_job: "JobMaker") -> None:
    job = make_job(epochs=10_000)
    process = job.start()
    wait_for_step(job, 3)
    (job.directory / "cancel").touch()
    assert process.wait() == 0
    assert job.lines()[-1]["kind"] == "cancelled"
    assert job.lines()[-1]["at_step"] == job.of_kind("step")[-1]["step"]
    assert not job.adapter.exists()


def test_sigterm_ends_the_training_even_while_it_is_loading(make_job: "JobMaker") -> None:
    job = make_job()
    process = job.start(STAY_WHEN_LOADED, loads=True)
    until((job.directory / "progress.jsonl").exists)
    # The process is somewhere in its imports now, or still before them.
    time.sleep(0.1)
    process.terminate()
    process.wait()
    assert [line["kind"] for line in job.lines()] in ([], ["cancelled"])


def test_serving_has_the_higher_priority(make_job: "JobMaker") -> None:
    job = make_job(epochs=10_000)
    process = job.start()
    wait_for_step(job, 1)
    lowered = os.getpriority(os.PRIO_PROCESS, process.pid)
    assert lowered == max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
    process.terminate()
    assert process.wait() == 0


@pytest.mark.soak
def test_a_training_that_stood_still_goes_on(make_job: "JobMaker") -> None:
    """A training stands still while its machine sleeps, or while its container is paused."""
    job = make_job(epochs=10_000)
    process = job.start()
    wait_for_step(job, 1)
    for _ in range(3):
        process.send_signal(signal.SIGSTOP)
        # The pause must be longer than the interval at which the training looks for a stop.
        time.sleep(2 * POLL_SECONDS)
        done = job.of_kind("step")[-1]["step"]
        process.send_signal(signal.SIGCONT)
        wait_for_step(job, done + 4)
    process.terminate()
    assert process.wait() == 0


def test_a_step_that_does_not_end_cannot_hold_up_a_cancel(make_job: "JobMaker") -> None:
    job = make_job()
    process = job.start(
        "from tuneship.training.learner import Learner\nimport time\nLearner.learn = lambda *_, **__: time.sleep(600)"
    )
    until(lambda: bool(job.of_kind("started")))
    process.terminate()
    assert process.wait() == 0
    assert job.lines()[-1] == {"kind": "cancelled", "at_step": 0}


def failure(job: "Job") -> dict[str, object]:
    assert job.run() == 1
    last = job.lines()[-1]
    assert last["kind"] == "failed"
    return last


def test_a_learning_rate_that_blows_the_loss_up_is_reported(make_job: "JobMaker") -> None:
    last = failure(make_job(learning_rate=1e30, warmup_steps=0, epochs=50))
    assert last["reason"] == "loss_not_finite"
    assert "learning rate" in str(last["message"])


def test_the_maximum_runtime_ends_the_training_and_keeps_a_checkpoint(make_job: "JobMaker") -> None:
    job = make_job(max_runtime_seconds=0.0)
    last = failure(job)
    assert (last["reason"], last["at_step"]) == ("max_runtime_exceeded", 1)
    kept = [path.name for path in job.spec.checkpoint_dir.iterdir() if path.is_dir()]
    assert kept == ["step-000000001"]


def test_an_unknown_target_module_is_reported_with_those_that_exist(make_job: "JobMaker") -> None:
    last = failure(make_job(target_modules=("q_proj", "w_pack")))
    assert last["reason"] == "internal"
    assert "no target module w_pack; it has down_proj" in str(last["message"])


def test_a_file_with_a_bad_line_is_reported_by_line_and_never_by_text(
    make_job: "JobMaker", tmp_path: Path
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"instruction": "CANARY-5eb1", "response": 3}\n')
    job = make_job(training_file=path)
    last = failure(job)
    assert last["reason"] == "data_unreadable"
    assert last["message"] == "broken.jsonl: line 1: wrong_type response"
    assert "CANARY" not in (job.directory / "progress.jsonl").read_text()


def test_no_text_of_the_data_reaches_the_progress(make_job: "JobMaker", tmp_path: Path) -> None:
    """Rows that are cut, dropped and set aside are logged, but the messages contain only numbers."""
    lines = [
        {"instruction": "CANARY-77 short", "response": "CANARY-77"},
        {"instruction": "CANARY-77 " * 20, "response": "CANARY-77 " * 30},
        {"instruction": "CANARY-77 " * 40, "response": "CANARY-77"},
    ]
    path = tmp_path / "canary.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines * 4))
    job = make_job(training_file=path, validation_file=None)
    assert job.run() == 0
    assert "CANARY" not in (job.directory / "progress.jsonl").read_text()
    messages = [line["message"] for line in job.of_kind("log")]
    assert messages[0] == (
        "cut to the context length of 256 tokens: 8 training examples; dropped, since nothing was left to learn: 4"
    )
    assert messages[1].startswith("no validation dataset: 1 of 8 training examples")


def test_conversations_train_as_well(make_job: "JobMaker", tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "colour?"},
        {"role": "assistant", "content": "red", "weight": 0},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "blue"},
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text(
        json.dumps({"messages": turns})
        + "\n"
        + json.dumps({"messages": turns[:1] + turns[3:]})
        + "\n"
    )
    job = make_job(
        training_file=path, validation_file=path, dataset_format="conversation", epochs=20
    )
    assert job.run() == 0
    steps = job.of_kind("step")
    assert steps[-1]["validation_loss"] < steps[0]["validation_loss"]
