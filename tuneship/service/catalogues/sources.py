"""Finds the source of a base model that an operator adds, and the files of it that are needed.

A source is a directory of a Hugging Face checkpoint, the id of one in the local cache of the hub, or a GGUF file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tuneship.conversion.gguf_header import GgufRefused, check_convertible, read_header
from tuneship.host.startup import StartupError
from tuneship.host.weight_files import WeightsFault, weight_files
from tuneship.service.catalogues.base_models import (
    CataloguedModel,
    CatalogueFault,
    cached_snapshot,
    named_licence,
)

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
# The files beside the weights that training and serving read, and the licence.
SIDE_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt"),
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class AddingRefused(StartupError):
    """A base model was not added, changed or removed; the message says why."""


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint that can be copied."""

    kind: str
    name: str
    folder: Path

    def files(self) -> list[str]:
        """The names of the files to copy. Raises `AddingRefused` for a checkpoint that cannot be served."""
        try:
            weights = weight_files(self.folder)
        except WeightsFault as fault:
            if not any(self.folder.glob("*.safetensors")) and any(
                file for kind in PICKLES for file in self.folder.glob(kind)
            ):
                raise AddingRefused(
                    f"{self.name} holds its weights as pickles only, which can run code when they are read: "
                    "save them as safetensors first"
                ) from None
            raise AddingRefused(f"{self.name} cannot be added: {fault}") from None
        # Nothing is loaded for it, so that a mistake shows at once.
        fault = CataloguedModel(self.name, self.folder, self.name, "", "").fault
        if fault is not None:
            raise AddingRefused(f"{self.name} cannot be added: {fault}")
        beside = [name for name in SIDE_FILES if (self.folder / name).is_file()]
        index = [] if weights.index is None else [weights.index]
        return [*beside, *(file.name for file in [*weights.files, *index])]

    @property
    def licence(self) -> str | None:
        """The licence that the model card names."""
        return named_licence(self.folder)


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file that can be converted."""

    name: str
    file: Path
    licence: str | None
    # Size of the checkpoint that is made of it, roughly.
    bytes_needed: int
    kind: str = "gguf"


def find_source(text: str) -> CheckpointSource | GgufSource:
    """The source that a user names. Raises `AddingRefused`."""
    path = Path(text)
    if path.is_dir():
        return CheckpointSource("directory", path.resolve().name, path)
    if path.is_file():
        try:
            header = read_header(path)
            check_convertible(header)
        except GgufRefused as error:
            raise AddingRefused(f"{path.name} cannot be added: {error}") from None
        except OSError as error:
            raise AddingRefused(f"{path.name} cannot be read: {error.strerror}") from None
        # The checkpoint that is made of it is in 16 bits, or in float32 where all of the file is.
        width = 4 if all(tensor.format == "F32" for tensor in header.tensors) else 2
        return GgufSource(path.name, path, header.licence, header.parameters * width)
    if path.suffix == ".gguf" or not HUB_ID.fullmatch(text):
        raise AddingRefused(f"{text}: no such file or directory")
    try:
        return CheckpointSource("hub", text, cached_snapshot(text))
    except CatalogueFault as fault:
        raise AddingRefused(str(fault)) from None


def default_id(source: CheckpointSource | GgufSource) -> str:
    """An id made of the source's name, which may still be refused."""
    name = Path(source.name).stem if isinstance(source, GgufSource) else Path(source.name).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:64]
