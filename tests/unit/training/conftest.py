"""A tiny real model, small data, and the training process started as the service starts it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_model import build_tiny_model
from tuneship.training.spec import ResolvedHyperparameters, TrainingSpec

COLOURS = ("red", "green", "blue", "black", "white", "brown")
ROOT = Path(__file__).parents[3]
PATIENCE_S = 600.0
"""Seconds until a training must have ended. It imports torch first, perhaps on a busy machine."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def write_rows(path: Path, count: int, *, shift: int = 1) -> Path:
    """Write instructions of different lengths whose answer depends on the last word."""
    lines = [
        {
            "instruction": f"What is case {number} {'very ' * (number % 7)}{COLOURS[number % 6]}?",
            "response": COLOURS[(number + shift) % 6],
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Job:
    """One work directory and the processes started on it."""

    def __init__(self, directory: Path, spec: TrainingSpec) -> None:
        self.directory = directory
        self.spec = spec
        self.adapter = spec.output_dir / "adapter"
        self._processes: list[subprocess.Popen[bytes]] = []
        directory.mkdir(parents=True)
        (directory / "spec.json").write_text(spec.to_json())

    def start(self, preamble: str = "") -> subprocess.Popen[bytes]:
        """Start the process. `preamble` has Python lines that run first in it (to plant a fault)."""
        program = (
            f"{preamble}\nimport sys\nfrom tuneship.training.__main__ import main\n"
            f"sys.exit(main([{str(self.directory)!r}]))"
        )
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            cwd=ROOT,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
        self._processes.append(process)
        return process

    def run(self, preamble: str = "") -> int:
        return self.start(preamble).wait(PATIENCE_S)

    def lines(self) -> list[dict[str, Any]]:
        """Return the progress so far. A last line that is still being written is left out."""
        path = self.directory / "progress.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["kind"] == kind]

    def weights(self) -> bytes:
        return (self.adapter / "adapter_model.safetensors").read_bytes()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class JobMaker:
    """Makes jobs on the tiny model. Keyword arguments replace fields of the spec or hyperparameters."""

    def __init__(self, directory: Path, base_model: Path) -> None:
        self._directory = directory
        self._jobs: list[Job] = []
        self.training_file = write_rows(directory / "training.jsonl", 48)
        self.validation_file = write_rows(directory / "validation.jsonl", 12)
        self._base_model = base_model

    def __call__(self, **changes: Any) -> Job:
        number = len(self._jobs)
        directory = self._directory / f"job-{number}"
        settings = ResolvedHyperparameters(
            learning_rate=0.02,
            batch_size=8,
            epochs=2,
            warmup_steps=2,
            lora_rank=4,
            lora_alpha=8,
            lora_dropout=0.1,
            target_modules=("all-linear",),
            seed=7,
        )
        spec = TrainingSpec(
            base_model=str(self._base_model),
            training_file=self.training_file,
            validation_file=self.validation_file,
            dataset_format="instruction",
            output_dir=directory / "output",
            checkpoint_dir=directory / "checkpoints",
            validation_frequency=0.5,
            max_runtime_seconds=600.0,
            threads=1,
            hyperparameters=settings,
        )
        names = set(ResolvedHyperparameters.__dataclass_fields__)
        settings = replace(settings, **{k: v for k, v in changes.items() if k in names})
        spec = replace(spec, **{k: v for k, v in changes.items() if k not in names})
        job = Job(directory, replace(spec, hyperparameters=settings))
        self._jobs.append(job)
        return job

    def close(self) -> None:
        for job in self._jobs:
            job.close()


@pytest.fixture(scope="module")
def whole_job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Job:
    """Run a job as `make_job()` makes it to its end without a break."""
    job = JobMaker(tmp_path_factory.mktemp("whole"), tiny_model)()
    assert job.run() == 0
    return job


@pytest.fixture
def make_job(tmp_path: Path, tiny_model: Path) -> Iterator[JobMaker]:
    maker = JobMaker(tmp_path, tiny_model)
    yield maker
    maker.close()
