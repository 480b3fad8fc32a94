"""Compares the speed of LoRA training with TRL's `SFTTrainer` and transformers' `Trainer` + peft, on the same rows.

    python benchmarks/training.py [--rows 2000] [--rounds 3] [--base DIR] [--learning-rate 1e-3] [--peers PYTHON]
        [--same-work-rows 320] [--validation-rows 992]

All train on the ICD-10-CM rows for one epoch on one thread, from the same initial adapter, and are evaluated at the
end. The sides alternate, and each round has a seed of its own. The peers keep their defaults (padding to the longest
row of a batch, their own dropout and logits), except that TRL learns completions only, in float32 and without gradient
checkpointing, as tuneship does. The peers run twice: with the rows in tuneship's order, and grouped by length.

First, without dropout and in the same order, all must end at the same loss: then they do the same work, and only then
speeds are printed. With dropout each side draws its own masks: how far its losses spread over the rounds, and its mean
lies from tuneship's, is printed beside the speeds. CPU
seconds are the steadier figure on a machine with other work. The memory is what a process takes at most, from its start
to the end of its training. TRL is installed in an environment of its own
(`measuring/environments.py`), or in that of `--peers`.
"""

# ruff: noqa: TID251 (it starts itself with a thread setting)
import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring.environments import PeerMissing, python_with
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from tuneship.training.base_model import load_base, load_encoder
from tuneship.training.device import device, needs_autocast
from tuneship.training.examples.batches import collate, epoch_batches, micro_batches
from tuneship.training.examples.data_files import Data, read_data
from tuneship.training.learner import Learner
from tuneship.training.objective import SupervisedFineTuning
from tuneship.training.progress_file import ProgressFile, StopRequest
from tuneship.training.spec import ResolvedHyperparameters, TrainingSpec
from tuneship.training.training_loop import TrainingLoop

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "icd10cm"
# Masks of dropout moved the mean of three rounds by 1.4 %.
LESS_LEARNT = 0.02
PEER = ["trl>=1.16,<2"]
SIDES = ("tuneship", "Trainer", "SFTTrainer", "Trainer, grouped", "SFTTrainer, grouped")
TARGETS = {"as they come": 1.3, "grouped by length": 1.0}


@dataclass(frozen=True)
class Measurement:
    """One run of one side; the seconds are those of training, without evaluation."""

    side: str
    # Without padding.
    tokens: int
    seconds: float
    cpu_seconds: float
    peak_mb: int
    validation_loss: float
    versions: str


class Stopwatch:
    """Wall and CPU time since the start, without the time inside its `with` blocks."""

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

    def read(self) -> tuple[float, float]:
        """Wall and CPU seconds until now."""
        wall, cpu = (
            end - begin - paused
            for end, begin, paused in zip(self._now(), self._start, self._paused, strict=True)
        )
        return wall, cpu

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def peak_mb() -> int:
    """The memory that this process has taken at most, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // 1_000_000


def versions(*packages: str) -> str:
    """The names of packages with their installed versions."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)


def run_tuneship(spec: TrainingSpec) -> Measurement:
    """Run tuneship's own loop, including checkpoints and progress lines."""

    class TimedRun(TrainingLoop):
        def _evaluate(self) -> None:
            with stopwatch:
                super()._evaluate()

    base, data, progress = loaded(spec)
    learner = Learner(base, spec.hyperparameters, SupervisedFineTuning())
    warm_up(learner.model, data)
    stop = StopRequest(spec.training_file.parent / "cancel")
    run = TimedRun(spec, data, learner, progress, stop)
    stopwatch = Stopwatch()
    standing = run.execute(time.monotonic() + spec.max_runtime_seconds)
    measured, tokens = stopwatch.read(), len(data.training.tokens)
    return Measurement(
        "tuneship",
        tokens,
        *measured,
        peak_mb(),
        standing.measures["validation_loss"],
        versions("torch"),
    )


def run_peer(spec: TrainingSpec, side: str) -> Measurement:
    """Run a peer's own loop on the same rows and labels."""
    settings = spec.hyperparameters
    base, data, _ = loaded(spec)
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=int(settings.lora_alpha),
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    # The same initial adapter as in tuneship.
    torch.manual_seed(settings.seed)
    model = get_peft_model(base, config)
    choices = arguments_of(spec, grouped=side.endswith("grouped"))
    choices |= {"bf16": needs_autocast(base.device, base.dtype)}
    trainer = (sft_trainer if side.startswith("SFT") else plain_trainer)(model, choices, data, spec)
    warm_up(model, data)
    stopwatch = Stopwatch()
    trainer.train()
    measured = (*stopwatch.read(), peak_mb())
    packages = ("trl",) if side.startswith("SFT") else ("transformers", "peft")
    loss = token_loss(trainer.model, data)
    return Measurement(side, len(data.training.tokens), *measured, loss, versions(*packages))


def warm_up(model: Any, data: Data) -> None:
    """Pass a row through the model, forward and back: a GPU loads its libraries and programs with the first one."""
    if device().type == "cuda":
        tokens = torch.from_numpy(collate(data.training, data.training_indices[:1]).tokens)
        logits = model(input_ids=tokens.to(model.device), use_cache=False).logits
        logits.float().sum().backward()
        model.zero_grad()


def loaded(spec: TrainingSpec) -> tuple[Any, Data, ProgressFile]:
    """Load model and rows, and use one thread."""
    torch.set_num_threads(1)
    progress = ProgressFile(spec.training_file.parent / "progress.jsonl")
    base = load_base(spec.base_model)
    encoder = load_encoder(spec.base_model, base)
    return base, read_data(spec, encoder, SupervisedFineTuning(), progress), progress


def arguments_of(spec: TrainingSpec, *, grouped: bool) -> dict[str, Any]:
    """The options of both peers; all others keep their defaults."""
    settings = spec.hyperparameters
    return {
        "output_dir": str(spec.output_dir),
        "per_device_train_batch_size": settings.batch_size,
        "num_train_epochs": settings.epochs,
        "learning_rate": settings.learning_rate,
        "train_sampling_strategy": "group_by_length" if grouped else "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": settings.seed,
        "use_cpu": device().type == "cpu",
    }


def plain_trainer(model: Any, choices: dict[str, Any], data: Data, spec: TrainingSpec) -> Any:
    """The `Trainer` of transformers."""
    rows: Any = [
        {"input_ids": tokens, "labels": labels, "attention_mask": [1] * len(tokens)}
        for tokens, labels in in_our_order(data, spec)
    ]
    return Trainer(
        model=model, args=TrainingArguments(**choices), train_dataset=rows, data_collator=pad
    )


def sft_trainer(model: Any, choices: dict[str, Any], data: Data, spec: TrainingSpec) -> Any:
    """The `SFTTrainer` of TRL, on tokens with a completion mask."""
    # Installed only in the peer's environment.
    from datasets import Dataset  # type: ignore[import-not-found]  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]  # noqa: PLC0415

    rows = [
        {"input_ids": tokens, "completion_mask": [int(label >= 0) for label in labels]}
        for tokens, labels in in_our_order(data, spec)
    ]
    return SFTTrainer(
        model=model,
        args=SFTConfig(**choices, completion_only_loss=True, gradient_checkpointing=False),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(spec.base_model),
    )


def in_our_order(data: Data, spec: TrainingSpec) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens and labels of the rows, in the order of tuneship's first epoch."""
    settings, rows = spec.hyperparameters, data.training
    batches = epoch_batches(data.training_indices, settings.batch_size, seed=settings.seed, epoch=0)
    places = list(pairwise(rows.starts))
    for index in np.concatenate(batches):
        start, stop = places[index]
        tokens, learnt = rows.tokens[start:stop].tolist(), rows.loss_mask[start:stop].tolist()
        yield tokens, [token if mark else -100 for token, mark in zip(tokens, learnt, strict=True)]


def pad(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad rows to the longest, as transformers' collators do."""
    width = max(len(row["input_ids"]) for row in batch)
    filling = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([row[name] + [value] * (width - len(row[name])) for row in batch])
        for name, value in filling.items()
    }


def token_loss(model: Any, data: Data) -> float:
    """Mean loss over validation tokens, as tuneship computes it; the peers report a mean of batch means."""
    model.eval()
    total, count = 0.0, 0
    for part in micro_batches(data.validation_indices, data.validation.lengths, 4096):
        batch = collate(data.validation, part)
        tokens, positions, targets = (
            torch.from_numpy(part).to(model.device)
            for part in (batch.tokens, batch.logit_positions, batch.targets)
        )
        with torch.inference_mode():
            logits = model(input_ids=tokens).logits.flatten(0, 1)[positions].float()
        losses = functional.cross_entropy(logits, targets, reduction="sum")
        total, count = total + losses.item(), count + len(batch.targets)
    return total / count


def make_spec(options: argparse.Namespace, directory: Path) -> TrainingSpec:
    """The training of the demo, on the first `rows` rows."""
    text = (EXAMPLES / "hospital_a.jsonl").read_text() + (EXAMPLES / "hospital_b.jsonl").read_text()
    training_file = directory / "training.jsonl"
    training_file.write_text("".join(text.splitlines(keepends=True)[: options.rows]))
    validation_file = directory / "validation.jsonl"
    lines = (EXAMPLES / "validation.jsonl").read_text().splitlines(keepends=True)
    validation_file.write_text("".join(lines[: options.validation_rows]))
    settings = ResolvedHyperparameters(
        learning_rate=options.learning_rate,
        batch_size=16,
        epochs=1,
        warmup_steps=0,
        lora_rank=16,
        lora_alpha=32,
        lora_dropout=options.dropout,
        target_modules=("all-linear",),
        seed=options.seed,
    )
    return TrainingSpec(
        base_model=str(options.base),
        training_file=training_file,
        validation_file=validation_file,
        dataset_format="instruction",
        output_dir=directory / "output",
        checkpoint_dir=directory / "checkpoints",
        validation_frequency=1.0,
        max_runtime_seconds=3600.0,
        threads=1,
        hyperparameters=settings,
    )


def run_apart(side: str, options: argparse.Namespace, **other: float) -> Measurement:
    """One run in a process of its own; `other` overrides options."""
    chosen = vars(options) | other
    python = options.peers if side.startswith("SFT") else sys.executable
    call = [python, "-W", "ignore", __file__, "--side", side]
    for name in ("base", "rows", "validation_rows", "learning_rate", "dropout", "seed"):
        call += [f"--{name.replace('_', '-')}", str(chosen[name])]
    setting = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        call, check=False, capture_output=True, text=True, env=os.environ | setting
    )
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-2000:]}")
    found = Measurement(**json.loads(done.stdout.splitlines()[-1]))
    rate = found.tokens / found.cpu_seconds
    line = f"{side}, seed {chosen['seed']}: {found.validation_loss:.4f}, {rate:.0f} tokens/CPU s"
    print(line, file=sys.stderr, flush=True)
    return found


def check_same_work(options: argparse.Namespace) -> None:
    """Exit with 1 unless the sides with the same order end a short training without dropout at the same loss."""
    rows = options.same_work_rows
    sides = [run_apart(side, options, rows=rows, dropout=0.0) for side in SIDES[:3]]
    losses = [run.validation_loss for run in sides]
    listed = ", ".join(f"{run.side} {run.validation_loss:.6f}" for run in sides)
    print(f"validation loss after {rows} rows without dropout: {listed}", flush=True)
    if any(not abs(loss / losses[0] - 1) <= options.same_work_tolerance for loss in losses):
        sys.exit("the sides do not do the same work: no speed is printed")


def report(runs: list[Measurement]) -> None:
    """Print the losses with their noise, the table, and the ratio of tuneship to the better peer."""
    by_side = {side: [run for run in runs if run.side == side] for side in SIDES}
    losses = {
        side: statistics.fmean(run.validation_loss for run in of) for side, of in by_side.items()
    }
    ours = losses["tuneship"]
    for side, loss in losses.items():
        found = [run.validation_loss for run in by_side[side]]
        listed = " ".join(f"{one:.4f}" for one in found)
        noise = f"{loss:.4f} ({loss / ours - 1:+.1%}), rounds {(max(found) - min(found)) / loss:.1%} apart"
        print(f"{side:22}validation loss, mean {noise}: {listed}   {by_side[side][0].versions}")
    # Grouped rows come in another order, which is other work: a side that learns less by it is marked.
    less = [side for side, loss in losses.items() if loss > ours * (1 + LESS_LEARNT)]
    print(f"{'median':22}{'tokens/s':>10}{'tokens/CPU s':>14}{'MB at most':>12}")
    rates = {side: [run.tokens / run.cpu_seconds for run in of] for side, of in by_side.items()}
    for side, of in by_side.items():
        wall = statistics.median(run.tokens / run.seconds for run in of)
        rate, mark = statistics.median(rates[side]), "  (learnt less)" * (side in less)
        memory = statistics.median(run.peak_mb for run in of)
        print(f"{side:22}{wall:>10.0f}{rate:>14.0f}{memory:>12.0f}{mark}")
    for peers, (name, target) in zip((SIDES[1:3], SIDES[3:]), TARGETS.items(), strict=True):
        better = [max(of) for of in zip(*(rates[side] for side in peers), strict=True)]
        ratios = [a / b for a, b in zip(rates["tuneship"], better, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        middle = statistics.median(ratios)
        print(f"tuneship / the better, {name}: {middle:.2f} ({spread}; CPU), target {target}")


def main() -> None:
    """Run all sides alternately and compare; with `--side`, which the program passes to itself, run one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=ROOT / "tuneship/base_models/tuneship-tiny")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--same-work-rows", type=int, default=320)
    parser.add_argument("--same-work-tolerance", type=float, default=0.001)
    parser.add_argument("--validation-rows", type=int, default=992)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=42, help="of the first round")
    parser.add_argument("--peers", type=Path, help="the Python of an environment that has TRL")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        with tempfile.TemporaryDirectory() as directory:
            spec = make_spec(options, Path(directory))
            is_ours = options.side == "tuneship"
            run = run_tuneship(spec) if is_ours else run_peer(spec, options.side)
            print(json.dumps(asdict(run)))
        return
    try:
        options.peers = options.peers or python_with("trl", PEER)
    except PeerMissing as missing:
        print(missing)
        return
    check_same_work(options)
    seeds = range(options.seed, options.seed + options.rounds)
    report([run_apart(side, options, seed=seed) for seed in seeds for side in SIDES])


if __name__ == "__main__":
    main()
