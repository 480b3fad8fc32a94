"""The origin of an added base model: `origin.json` in its folder, written when it was added."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuneship.host.durable import flush_open

ORIGIN_FILE = "origin.json"
# The names of base models that can be added: part of the ids of models and of URLs.
MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Origin:
    """The source of an added base model, and how it was read."""

    # `directory`, `hub` (the local cache) or `gguf`.
    kind: str
    # Name of the directory, the hub's id, or name of the file.
    source: str
    # SHA-256 of each file of the source that was used.
    source_sha256: dict[str, str]
    # SHA-256 of each file of the base model.
    sha256: dict[str, str]
    # Versions of the libraries that read it.
    versions: dict[str, str]
    added_at: str
    # The licence that the source names.
    licence: str | None
    # Loss of a fixed text as transformers read the source.
    loss_before: float
    # The same as our engine read the base model.
    loss_after: float
    # The number format in which it is served: chosen or measured when it was added; None: not chosen.
    weights: str | None = None
    # The loss of the text in that format; None: not chosen.
    served_loss: float | None = None
    # Why the model can be served and not tuned.
    tuning_fault: str | None = None

    def write(self, folder: Path) -> None:
        """Write the file, flushed. Raises `OSError`."""
        with (folder / ORIGIN_FILE).open("x", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=2, ensure_ascii=False)
            file.write("\n")
            flush_open(file)

    @classmethod
    def read(cls, folder: Path) -> "Origin":
        """Read the file. Raises `OSError`, and ValueError when it is damaged."""
        fields: dict[str, Any] = json.loads((folder / ORIGIN_FILE).read_text(encoding="utf-8"))
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(f"{ORIGIN_FILE} is not understood") from error


def added_folder(data_dir: Path) -> Path:
    """The folder of the base models that were added, each in a folder named as its id."""
    return data_dir / "base_models"
