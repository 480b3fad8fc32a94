"""What one training process is asked to do: written by the supervisor, read by the process.

Torch-free, so that the service may import it. Next: `tuneship/training/run.py`.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuneship.contract.dataset_lines import DatasetFormat

SPEC_FILE = "spec.json"
PROGRESS_FILE = "progress.jsonl"
CANCEL_FILE = "cancel"
# Exit code of a process whose further process ended by a signal, less the signal's number; as in
# shells.
SIGNALLED = 128
# What the process writes to its standard output and error.
LOG_FILE = "worker.log"


@dataclass(frozen=True)
class ResolvedHyperparameters:
    """Resolved values, already checked at the border (ranges: api docs, fine-tuning jobs)."""

    learning_rate: float
    batch_size: int
    """Examples per optimizer step; the process splits a batch that is too large for its memory."""
    epochs: int
    warmup_steps: int
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    target_modules: tuple[str, ...]
    """Names of linear modules (`q_proj`), or the single word `all-linear`."""
    seed: int
    early_stopping_patience: int | None = None
    """Measurements in a row without a new lowest validation loss, after which the training ends; None: never."""


@dataclass(frozen=True)
class DataKeys:
    """What opens and seals the files of a job (`tuneship/security/sealed_files.py`); None: they are plain."""

    training: str | None = None
    validation: str | None = None
    checkpoints: str | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class Order:
    """What a process is told on its pipe, in one line: nothing of it is ever in a file."""

    folder: Path
    """Its work directory."""
    keys: DataKeys = field(default_factory=DataKeys, repr=False)

    def to_line(self) -> str:
        """One line of JSON, with its end."""
        return json.dumps(asdict(self), default=str) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Order | None":
        """The inverse; None for a line that the other end closed before it was whole."""
        if not line.endswith("\n"):
            return None
        fields: dict[str, Any] = json.loads(line)
        return cls(Path(fields["folder"]), DataKeys(**fields["keys"]))


@dataclass(frozen=True)
class TrainingSpec:
    """The work of one attempt; a later attempt gets the same spec and `checkpoint_dir`."""

    base_model: str
    """A model directory, or a hub id that is already in the local cache."""
    training_file: Path
    validation_file: Path | None
    """None: a tenth of the training examples is set aside."""
    dataset_format: DatasetFormat
    output_dir: Path
    """`adapter/` appears in here, whole or not at all."""
    checkpoint_dir: Path
    """Survives attempts; belongs to this job alone."""
    validation_frequency: float
    """Up to 1: fraction of an epoch; 2 and above: a number of steps."""
    max_runtime_seconds: float
    """Of this attempt."""
    threads: int
    """0: choose by the size of the model."""
    hyperparameters: ResolvedHyperparameters
    devices: int = 1
    """Learn on so many at most, each with a process of its own (`distributed.py`)."""

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
        validation_file = fields.pop("validation_file")
        return cls(
            **fields,
            validation_file=None if validation_file is None else Path(validation_file),
            hyperparameters=ResolvedHyperparameters(**values),
        )
