"""The base models: the shipped one and those of a catalogue file. Reads checkpoints' metadata without loading torch.

A catalogue is YAML: `models: [{id, path, name?, version?, description?}]`, where `path` is a checkpoint directory or a
hub id that is already in the local cache. Code from a checkpoint is never run.
"""

import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import yaml
from tokenizers import Tokenizer

from tuneship.template import PromptTemplate

SHIPPED = Path(__file__).parents[1] / "base_models"


class CatalogueFault(Exception):
    """The catalogue file or a checkpoint that it names cannot be used."""


@dataclass(frozen=True)
class BaseModel:
    """One checkpoint on this machine."""

    id: str
    path: Path
    name: str
    version: str
    description: str

    @cached_property
    def tensors(self) -> dict[str, list[int]]:
        """Name and shape of every weight, from the heads of the safetensors files."""
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise CatalogueFault(f"the base model {self.id} has no safetensors file")
        return {name: shape for file in files for name, shape in _shapes(file).items()}

    @cached_property
    def parameters(self) -> int:
        """How many numbers the checkpoint holds."""
        total = 0
        for shape in self.tensors.values():
            size = 1
            for length in shape:
                size *= length
            total += size
        return total

    @cached_property
    def context_length(self) -> int:
        """Tokens of prompt and completion together."""
        config = json.loads((self.path / "config.json").read_text())
        return int(config.get("max_position_embeddings") or config.get("n_positions") or 2048)

    @cached_property
    def linear_modules(self) -> frozenset[str]:
        """Module names that LoRA can target, e.g. `q_proj`."""
        return frozenset(
            name.split(".")[-2]
            for name, shape in self.tensors.items()
            if name.endswith(".weight") and len(shape) == 2 and ".layers." in f".{name}"
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The fast tokenizer, without transformers."""
        return cast("Any", Tokenizer).from_file(str(self.path / "tokenizer.json"))

    @cached_property
    def template(self) -> PromptTemplate:
        """The chat template of the checkpoint."""
        return PromptTemplate.load(self.path)

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        for name in ("generation_config.json", "config.json"):
            file = self.path / name
            found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
            if found is not None:
                return (found,) if isinstance(found, int) else tuple(found)
        return ()


def _shapes(file: Path) -> dict[str, list[int]]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        head: dict[str, Any] = json.loads(opened.read(length))
    return {name: one["shape"] for name, one in head.items() if name != "__metadata__"}


class Catalogue:
    """All base models by id."""

    def __init__(self, file: Path | None = None) -> None:
        """The shipped models, then those of `file`. Raises `CatalogueFault`."""
        self._models = {one.id: one for one in (*_shipped(), *_listed(file))}

    def __iter__(self) -> Any:
        """By id."""
        return iter(sorted(self._models.values(), key=lambda model: model.id))

    def get(self, identifier: str) -> BaseModel | None:
        """The base model with this id."""
        return self._models.get(identifier)

    @property
    def default(self) -> BaseModel:
        """The first shipped model; its tokenizer counts a dataset's tokens."""
        return next(iter(self._models.values()))


def _shipped() -> list[BaseModel]:
    folders = sorted(one for one in SHIPPED.iterdir() if (one / "config.json").is_file())
    return [
        BaseModel(
            id=folder.name,
            path=folder,
            name=folder.name,
            version="1",
            description="Shipped tiny model of US diagnosis texts, for demos and tests",
        )
        for folder in folders
    ]


def _listed(file: Path | None) -> list[BaseModel]:
    if file is None:
        return []
    try:
        entries = yaml.safe_load(file.read_text())["models"]
        return [_entry(entry, file.parent) for entry in entries]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise CatalogueFault(
            f"the model catalogue {file} cannot be read: {type(error).__name__}"
        ) from error


def _entry(entry: dict[str, Any], folder: Path) -> BaseModel:
    path = folder / str(entry["path"])
    if not path.is_dir():
        path = _cached(str(entry["path"]))
    return BaseModel(
        id=str(entry["id"]),
        path=path,
        name=str(entry.get("name", entry["id"])),
        version=str(entry.get("version", "")),
        description=str(entry.get("description", "")),
    )


def _cached(hub_id: str) -> Path:
    """The snapshot of a hub id in the local cache; nothing is downloaded."""
    import huggingface_hub  # noqa: PLC0415 - only for hub ids
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    hub: Any = huggingface_hub
    try:
        return Path(hub.snapshot_download(hub_id, local_files_only=True))
    except LocalEntryNotFoundError:
        raise CatalogueFault(
            f"the model {hub_id} is neither a directory nor in the local cache"
        ) from None
