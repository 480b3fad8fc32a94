"""The order of a reading process and its report, as JSON files. Loads no large library."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Our engine and transformers compute in another order, and a converted model is kept in 16 bits where it was quantized.
# This much the losses of single tokens may differ for it, as the root of the mean of the squares.
ALLOWED_DIFFERENCE = 0.01
# What the engine is asked by a check.
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class ReadingOrder:
    """The model to read: transformers reads `source`, our engine `target`."""

    source: str
    """Folder of a checkpoint, or of the GGUF file."""
    target: str
    """Folder of the checkpoint to serve. With a GGUF file, it is written first."""
    gguf_file: str | None = None
    """Name of the GGUF file in `source`."""
    weights: str | None = None
    """The number format in which it is to be served: `float32`, `bfloat16`, `int8`, `int4` or `auto`."""
    end_tokens: list[int] | None = None
    """Token ids that end an answer to a fixed question; None asks no question."""

    def write(self, file: Path) -> None:
        """Write the order. Raises `OSError`."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> "ReadingOrder":
        """Read an order."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class ReadingReport:
    """The result of an order."""

    refused: str | None = None
    """Why the model cannot be used; then the other fields say nothing."""
    loss_before: float = 0.0
    """Mean loss of the tokens of a fixed text, as transformers reads the source."""
    loss_after: float = 0.0
    """The same, as our engine reads the target."""
    difference: float = 0.0
    """Root mean square of the differences of single tokens' losses."""
    served_format: str = "float32"
    """The number format in which the model is served on this machine. The losses above are of float32."""
    served_loss: float | None = None
    """The loss as our engine computes it in that format, where the order names one or asks a question."""
    answer: str | None = None
    """The answer in that format."""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    """Versions of the libraries that read the model, by name."""

    @property
    def is_alike(self) -> bool:
        """Whether engine and transformers compute the same but for rounding."""
        return self.difference <= ALLOWED_DIFFERENCE  # false for NaN

    def write(self, file: Path) -> None:
        """Write the report. Raises `OSError`."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> "ReadingReport":
        """Read a report. Raises `OSError` without one."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))
