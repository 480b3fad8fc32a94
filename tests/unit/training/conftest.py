"""A tiny real model, small data, and the training process started as the service starts it."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_model import build_tiny_model
from tests.support.waiting import until
from tuneship.processes.forked_workers import LIBRARIES, ForkedProcesses
from tuneship.processes.worker_processes import LocalProcesses
from tuneship.processes.worker_protocol import Runtime, Worker, WorkerSpec
from tuneship.training.spec import ResolvedHyperparameters, TrainingSpec

COLOURS = ("red", "green", "blue", "black", "white", "brown")
ROOT = Path(__file__).parents[3]
TRAINER = "tests.support.models.changed_trainer"
# Seconds until a training must have ended, perhaps on a busy machine.
PATIENCE_S = 600.0


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """Start trainings as a service does: forked from a process that has loaded their libraries."""
    log = tmp_path_factory.mktemp("forks") / "fork-server.log"
    libraries = {TRAINER: LIBRARIES["tuneship.training"]}
    with closing(ForkedProcesses(isolated=False, log=log, libraries=libraries)) as runtime:
        yield runtime


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


class Trainer:
    """A training process, with the methods of `Popen` that tests need."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.kill_group = worker.kill

    @property
    def pid(self) -> int:
        return self._worker.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it has ended, and return its exit code."""
        until(lambda: self._worker.exit_code() is not None, PATIENCE_S)
        code = self._worker.exit_code()
        assert code is not None
        return code


class Job:
    """One work directory and the processes started on it."""

    def __init__(self, directory: Path, spec: TrainingSpec, forks: Runtime) -> None:
        self.directory = directory
        self.spec = spec
        self.adapter = spec.output_dir / "adapter"
        self._forks = forks
        self._trainers: list[Trainer] = []
        directory.mkdir(parents=True)
        (directory / "spec.json").write_text(spec.to_json())

    def start(self, lines: str = "", *, loads: bool = False) -> Trainer:
        """Start the process. `lines`: run first in it, e.g. to plant a fault. `loads`: it loads its own libraries."""
        runtime = LocalProcesses(isolated=False) if loads else self._forks
        spec = WorkerSpec(
            TRAINER, (lines, str(self.directory)), self.directory / "log", 1, needs_network=True
        )
        self._trainers.append(Trainer(runtime.start(spec)))
        return self._trainers[-1]

    def run(self, lines: str = "") -> int:
        return self.start(lines).wait()

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
        for trainer in self._trainers:
            trainer.kill_group()


class JobMaker:
    """Makes jobs on the tiny model. Keyword arguments replace fields of the spec or hyperparameters."""

    def __init__(self, directory: Path, base_model: Path, forks: Runtime) -> None:
        self._directory = directory
        self._jobs: list[Job] = []
        self.training_file = write_rows(directory / "training.jsonl", 48)
        self.validation_file = write_rows(directory / "validation.jsonl", 12)
        self._base_model = base_model
        self._forks = forks

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
        job = Job(directory, replace(spec, hyperparameters=settings), self._forks)
        self._jobs.append(job)
        return job

    def close(self) -> None:
        for job in self._jobs:
            job.close()


@pytest.fixture(scope="module")
def whole_job(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, forks: Runtime) -> Job:
    """Run a job as `make_job()` makes it to its end without a break."""
    job = JobMaker(tmp_path_factory.mktemp("whole"), tiny_model, forks)()
    assert job.run() == 0
    return job


@pytest.fixture
def make_job(tmp_path: Path, tiny_model: Path, forks: Runtime) -> Iterator[JobMaker]:
    maker = JobMaker(tmp_path, tiny_model, forks)
    yield maker
    maker.close()
