"""The work of one training process: written by the supervisor, read by the process.

Loads no torch, so that the service may import it. Next: `training_loop.py`.
"""

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tuneship.contract.lines.dataset_lines import DatasetFormat

SPEC_FILE = "spec.json"
PROGRESS_FILE = "progress.jsonl"
CANCEL_FILE = "cancel"
# On a node: the time until which the agent may let it compute (`tuneship/host/deadline_file.py`).
LEASE_FILE = "lease"
# A process whose worker rank was ended by a signal exits with this code plus the signal's number, as shells do.
SIGNALLED = 128
# In the folder of the checkpoints: the number format that the job's first attempt chose.
FORMAT_FILE = "number_format"
# Standard output and error of the process.
LOG_FILE = "worker.log"


@dataclass(frozen=True)
class ResolvedHyperparameters:
    """Hyperparameters without `auto`; the service has checked their ranges (API docs, fine-tuning jobs)."""

    learning_rate: float
    # Examples per optimizer step; the process splits a batch that is too large for its memory.
    batch_size: int
    epochs: int
    warmup_steps: int
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    # Names of linear modules (`q_proj`), or the single word `all-linear`.
    target_modules: tuple[str, ...]
    seed: int
    # The training ends after so many consecutive evaluations without a new best one; None: never.
    early_stopping_patience: int | None = None


@dataclass(frozen=True)
class DataKeys:
    """Keys for a job's sealed files (`tuneship/security/sealed_files.py`); None: the job has no such file."""

    training: str | None = None
    validation: str | None = None
    checkpoints: str | None = None
    adapter: str | None = None
    compared: str | None = None


NO_KEYS = DataKeys()


@dataclass(frozen=True)
class Order:
    """The line that a process reads from its pipe; the keys in it are never written to a file."""

    # The work directory.
    folder: Path
    keys: DataKeys = field(default_factory=DataKeys, repr=False)

    def to_line(self) -> str:
        """One line of JSON, with its line break."""
        return json.dumps(asdict(self), default=str) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Order | None":
        """The inverse of `to_line`; None for a truncated line, whose writer closed the pipe."""
        if not line.endswith("\n"):
            return None
        fields: dict[str, Any] = json.loads(line)
        return cls(Path(fields["folder"]), DataKeys(**fields["keys"]))


@dataclass(frozen=True)
class TrainingSpec:
    """The work of one attempt; a later attempt gets the same spec and `checkpoint_dir`."""

    # A model directory, or a hub id that is already in the local cache.
    base_model: str
    training_file: Path
    # None: a tenth of the training examples is set aside.
    validation_file: Path | None
    dataset_format: DatasetFormat
    # `adapter/` appears in here, whole or not at all.
    output_dir: Path
    # Survives attempts; belongs to this job alone.
    checkpoint_dir: Path
    # Up to 1: fraction of an epoch; 2 and above: a number of steps.
    validation_frequency: float
    # The time limit of this attempt.
    max_runtime_seconds: float
    # 0: choose by the size of the model.
    threads: int
    hyperparameters: ResolvedHyperparameters
    # The most devices to train on, each with a process of its own (`distributed.py`).
    devices: int = 1
    # The GPUs that it uses, as CUDA_VISIBLE_DEVICES names them; empty: all that it sees.
    gpus: tuple[str, ...] = ()
    # Whether other processes of the service use some of them, since there are more processes than GPUs.
    shares_gpus: bool = False
    # Digest of the base model's files where another machine may go on, which knows the model by another path perhaps.
    base_digest: str | None = None
    # The day that a chat template with a date writes: that of the job, since a later attempt must learn the same text.
    today: datetime | None = None
    # Draws the third of the validation rows that chooses the checkpoint; None: all choose, and no row is reported.
    comparison_seed: int | None = None
    # The adapter of the tuned model that is measured on the same rows, and the model's id.
    compared_adapter: Path | None = None
    compared_model: str | None = None

    @property
    def read_paths(self) -> tuple[Path, ...]:
        """The files and folders that the attempt reads and does not write."""
        files = (self.training_file, self.validation_file, self.compared_adapter)
        return (Path(self.base_model), *(file for file in files if file is not None))

    @property
    def written_paths(self) -> tuple[Path, ...]:
        """The folders to which the attempt writes, in addition to its own."""
        return self.output_dir, self.checkpoint_dir

    def to_json(self) -> str:
        """One JSON object; paths as text."""
        return json.dumps(asdict(self), default=str, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TrainingSpec":
        """The inverse of `to_json`. Raises KeyError or TypeError when fields are missing or unknown."""
        fields: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = fields.pop("hyperparameters")
        values["target_modules"] = tuple(values["target_modules"])
        for name in ("training_file", "output_dir", "checkpoint_dir"):
            fields[name] = Path(fields[name])
        fields["gpus"] = tuple(fields.get("gpus", ()))
        for name in ("validation_file", "compared_adapter"):
            path = fields.get(name)
            fields[name] = None if path is None else Path(path)
        today = fields.pop("today", None)
        return cls(
            **fields,
            hyperparameters=ResolvedHyperparameters(**values),
            today=None if today is None else datetime.fromisoformat(today),
        )
