"""Orders to this package's processes and their reports, as JSON files. Loads no large library."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

# Our engine and transformers compute in another order, and a converted model is kept in 16 bits where it was quantized.
# This much the losses of single tokens may differ for it, as the root of the mean of the squares.
ALLOWED_DIFFERENCE = 0.01
MAX_MESSAGE_BYTES = 1 << 20
# As trainings are: those who serve go first.
NICENESS = 5
# What the engine is asked by a check.
QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class ProcessMessage:
    """A JSON file that the service and a process of this package exchange."""

    def write(self, file: Path) -> None:
        """Write the file. Raises `OSError`."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a file. Raises `OSError` if it is missing, and ValueError if it is truncated or larger than any
        report.
        """
        # The text of a fault may quote a name in a foreign file.
        if file.stat().st_size > MAX_MESSAGE_BYTES:
            raise ValueError("too large")
        return cls(**json.loads(file.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class ReadingOrder(ProcessMessage):
    """The model to read: transformers reads `source`, our engine `target`."""

    # Folder of a checkpoint, or of the GGUF file.
    source: str
    # Folder of the checkpoint to serve. With a GGUF file, it is written first.
    target: str
    # Name of the GGUF file in `source`.
    gguf_file: str | None = None
    # The number format in which it is to be served: `float32`, `bfloat16`, `int8`, `int4` or `auto`.
    weights: str | None = None
    # Whether the engine is asked a fixed question, as in the check of a model that was added.
    asks: bool = False


@dataclass(frozen=True)
class ReadingReport(ProcessMessage):
    """The result of an order."""

    # Why the model cannot be used; then the other fields say nothing.
    fault: str | None = None
    # Mean loss of the tokens of a fixed text, as transformers reads the source.
    loss_before: float = 0.0
    # The same, as our engine reads the target.
    loss_after: float = 0.0
    # Root mean square of the differences of single tokens' losses.
    difference: float = 0.0
    # The number format in which the model is served on this machine. The losses above are of float32.
    served_format: str = "float32"
    # The loss as our engine computes it in that format, where the order names one or asks a question.
    served_loss: float | None = None
    # The answer in that format.
    answer: str | None = None
    # Versions of the libraries that read the model, by name.
    versions: dict[str, str] = field(default_factory=dict[str, str])
    # Facts for people about its tokenizer and its chat template, a sentence each.
    notes: list[str] = field(default_factory=list[str])
    # Why it can be served and not tuned.
    tuning_fault: str | None = None

    @property
    def is_alike(self) -> bool:
        """Whether engine and transformers compute the same but for rounding."""
        return self.difference <= ALLOWED_DIFFERENCE  # false for NaN


# The name of the file in an export to GGUF.
GGUF_FILE = "model.gguf"


@dataclass(frozen=True)
class ExportOrder(ProcessMessage):
    """A tuned model to export."""

    # Folder of its base model.
    base: str
    # Folder of its adapter, in plain.
    adapter: str
    # Folder to fill, which is there and empty.
    target: str
    # An `ExportFormat` of the contract.
    format: str
    # A `GgufType` of the contract.
    gguf_type: str = "f16"
    # The name of the base model in the export.
    base_name: str = ""
    # The name of the tuned model, and its licence, for the header of a GGUF file.
    name: str = ""
    licence: str | None = None


@dataclass(frozen=True)
class ExportReport(ProcessMessage):
    """The result of an export."""

    # Why there is no export; then the other fields say nothing.
    fault: str | None = None
    # Root mean square of the differences of all logits for fixed texts, between the export as it was read back and our
    # engine, as a share of the logits' standard deviation.
    difference: float = 0.0
    # The largest difference that rounding to this number format explains.
    allowed: float = 0.0
    # The number format of the exported weights, e.g. `bfloat16`.
    number_format: str = ""
    # Versions of the libraries that wrote and read it, by name.
    versions: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class ImportOrder(ProcessMessage):
    """An order to check an adapter that was trained elsewhere, and to write it like a tuned one."""

    # The tar archive in which it came, in plain; it is removed once it is unpacked.
    archive: str
    # Folder to fill with its tensors, its configuration and a parity file.
    target: str
    # The folders of the base models that it may be for, by id.
    bases: dict[str, str]
    # The id of the one that it is for; None: the one that it names.
    base_model: str | None = None


@dataclass(frozen=True)
class ImportReport(ProcessMessage):
    """The result of checking an imported adapter."""

    # The id of the base model that it is for; None where neither order nor adapter names one.
    base_model: str | None = None
    # Why the adapter is not taken, as the rest of a sentence that begins with it; None when nothing is wrong.
    fault: str | None = None
