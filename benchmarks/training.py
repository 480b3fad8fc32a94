"""How fast training is beside a plain transformers `Trainer` + peft run on the same rows, in turns.

    python benchmarks/training.py [--base DIR] [--rows 3000] [--rounds 3] [--learning-rate 5e-3]

Both learn the ICD-10-CM rows for one epoch on one thread, measured at each quarter. The peer keeps its
defaults: random order, padding to the longest of a batch, dropout and logits as peft and transformers
have them. Speed is told only when both end at the same validation loss. CPU seconds are the steadier
figure on a machine with other work.
"""

# ruff: noqa: TID251 (it starts itself with a thread setting)
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from tuneship.training.batches import collate, limited_batches
from tuneship.training.learner import Learner, load_base
from tuneship.training.progress import Progress, StopRequest
from tuneship.training.rows import Rows
from tuneship.training.run import Data, TrainingRun, load_encoder, read_data
from tuneship.training.spec import Hyperparameters, TrainingSpec

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "icd10cm"
LOSS_TOLERANCE = 0.15
"""Two seeds of one trainer differ by about a tenth; a loop that learns less would stand out by more."""


@dataclass(frozen=True)
class Measurement:
    """One run of one side. Seconds of training leave out those of measuring the validation loss."""

    side: str
    tokens: int
    """Useful ones: without padding."""
    seconds: float
    cpu_seconds: float
    evaluation_cpu_seconds: float
    validation_loss: float


class Stopwatch:
    """Wall and CPU time since the start, less what was spent inside `with paused`."""

    def __init__(self) -> None:
        self._start = self._now()
        self._paused = (0.0, 0.0)

    def __enter__(self) -> None:
        self._pause = self._now()

    def __exit__(self, *_exception: object) -> None:
        now = self._now()
        self._paused = tuple(
            total + end - begin
            for total, end, begin in zip(self._paused, now, self._pause, strict=True)
        )

    def measurement(self, side: str, tokens: int, validation_loss: float) -> Measurement:
        """What was measured until now."""
        wall, cpu = (
            end - begin - paused
            for end, begin, paused in zip(self._now(), self._start, self._paused, strict=True)
        )
        return Measurement(side, tokens, wall, cpu, self._paused[1], validation_loss)

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def run_tuneship(spec: TrainingSpec) -> Measurement:
    """Our loop, checkpoints and progress lines included."""

    class TimedRun(TrainingRun):
        def _measure(self) -> None:
            with stopwatch:
                super()._measure()

    torch.set_num_threads(1)
    directory = spec.training_file.parent
    progress = Progress(directory / "progress.jsonl")
    base = load_base(spec.base_model)
    data = read_data(spec, load_encoder(spec.base_model, base), progress)
    learner = Learner(base, spec.hyperparameters)
    run = TimedRun(spec, data, learner, progress, StopRequest(directory / "cancel"))
    stopwatch = Stopwatch()
    standing = run.execute(time.monotonic() + spec.max_runtime_seconds)
    return stopwatch.measurement("tuneship", len(data.training.tokens), standing.validation_loss)


def run_trainer(spec: TrainingSpec) -> Measurement:
    """The same rows and labels through transformers' Trainer and peft as they come."""
    torch.set_num_threads(1)
    settings = spec.hyperparameters
    torch.manual_seed(settings.seed)
    base = load_base(spec.base_model)
    progress = Progress(spec.training_file.parent / "progress.jsonl")
    data = read_data(spec, load_encoder(spec.base_model, base), progress)

    class TimedTrainer(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            with stopwatch:
                return super().evaluate(*args, **kwargs)

    steps = -(-len(data.training) // settings.batch_size)
    arguments = TrainingArguments(
        output_dir=str(spec.output_dir),
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=64,
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        eval_strategy="steps",
        eval_steps=-(-steps // 4),
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=settings.seed,
        use_cpu=True,
    )
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=int(settings.lora_alpha),
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    trainer = TimedTrainer(
        model=get_peft_model(base, config),
        args=arguments,
        train_dataset=_examples(data.training),
        eval_dataset=_examples(data.validation),
        data_collator=_pad,
    )
    stopwatch = Stopwatch()
    trainer.evaluate()
    trainer.train()
    measured = stopwatch.measurement("trainer", len(data.training.tokens), 0.0)
    return replace(measured, validation_loss=_token_loss(trainer.model, data))


def _examples(rows: Rows) -> list[dict[str, list[int]]]:
    found = []
    for start, stop in pairwise(rows.starts):
        tokens, learnt = rows.tokens[start:stop].tolist(), rows.learnt[start:stop].tolist()
        labels = [token if mark else -100 for token, mark in zip(tokens, learnt, strict=True)]
        found.append({"input_ids": tokens, "labels": labels, "attention_mask": [1] * len(tokens)})
    return found


def _pad(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in batch)
    filling = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([row[name] + [value] * (width - len(row[name])) for row in batch])
        for name, value in filling.items()
    }


def _token_loss(model: Any, data: Data) -> float:
    """Mean over validation tokens; the Trainer's own figure is a mean of means of batches."""
    model.eval()
    total, tokens = 0.0, 0
    for part in limited_batches(data.validation_indices, data.validation.lengths, 4096):
        batch = collate(data.validation, part)
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(batch.tokens)).logits.flatten(0, 1)
        losses = functional.cross_entropy(
            logits[torch.from_numpy(batch.places)], torch.from_numpy(batch.targets), reduction="sum"
        )
        total, tokens = total + losses.item(), tokens + len(batch.targets)
    return total / tokens


def make_spec(options: argparse.Namespace, directory: Path) -> TrainingSpec:
    """The demo's training, with the first `rows` of its rows."""
    text = (EXAMPLES / "hospital_a.jsonl").read_text() + (EXAMPLES / "hospital_b.jsonl").read_text()
    training_file = directory / "training.jsonl"
    training_file.write_text("".join(text.splitlines(keepends=True)[: options.rows]))
    settings = Hyperparameters(
        learning_rate=options.learning_rate,
        batch_size=16,
        epochs=1,
        warmup_steps=0,
        lora_rank=16,
        lora_alpha=32,
        lora_dropout=0.05,
        target_modules=("all-linear",),
        seed=42,
    )
    return TrainingSpec(
        base_model=str(options.base),
        training_file=training_file,
        validation_file=EXAMPLES / "validation.jsonl",
        dataset_format="instruction",
        output_dir=directory / "output",
        checkpoint_dir=directory / "checkpoints",
        validation_frequency=0.25,
        max_runtime_seconds=3600.0,
        threads=1,
        hyperparameters=settings,
    )


def run_apart(side: str, options: argparse.Namespace) -> Measurement:
    """One run in a process of its own."""
    call = [sys.executable, "-W", "ignore", __file__, "--side", side, "--base", str(options.base)]
    call += ["--rows", str(options.rows), "--learning-rate", str(options.learning_rate)]
    setting = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        call,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | setting | {"PYTHONPATH": str(ROOT)},
    )
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def report(runs: list[Measurement]) -> None:
    """Print the table, or leave with 1 when the losses differ."""
    middle = {
        side: {
            name: statistics.median(getattr(run, name) for run in runs if run.side == side)
            for name in (
                "tokens",
                "seconds",
                "cpu_seconds",
                "evaluation_cpu_seconds",
                "validation_loss",
            )
        }
        for side in ("trainer", "tuneship")
    }
    losses = {side: values["validation_loss"] for side, values in middle.items()}
    print(f"validation loss: Trainer {losses['trainer']:.4f}, tuneship {losses['tuneship']:.4f}")
    if losses["tuneship"] > losses["trainer"] * (1 + LOSS_TOLERANCE):
        sys.exit("tuneship learnt less than the Trainer: a speed would mean nothing")
    print(f"{'':10}{'tokens/s':>10}{'tokens/CPU s':>14}{'evaluation CPU s':>18}")
    for side, values in middle.items():
        wall, cpu = (values["tokens"] / values[name] for name in ("seconds", "cpu_seconds"))
        print(f"{side:10}{wall:>10.0f}{cpu:>14.0f}{values['evaluation_cpu_seconds']:>18.1f}")
    ratio = {
        name: middle["trainer"][name] / middle["tuneship"][name]
        for name in ("seconds", "cpu_seconds")
    }
    print(f"tuneship / Trainer: {ratio['seconds']:.2f} (wall), {ratio['cpu_seconds']:.2f} (CPU)")


def main() -> None:
    """Run both sides in turns and compare, or (`--side`, for the program itself) one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=ROOT / "tuneship/base_models/tuneship-tiny")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--side", choices=["tuneship", "trainer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        with tempfile.TemporaryDirectory() as directory:
            spec = make_spec(options, Path(directory))
            run = run_tuneship if options.side == "tuneship" else run_trainer
            print(json.dumps(asdict(run(spec))))
        return
    runs = [
        run_apart(side, options) for _ in range(options.rounds) for side in ("trainer", "tuneship")
    ]
    report(runs)


if __name__ == "__main__":
    main()
