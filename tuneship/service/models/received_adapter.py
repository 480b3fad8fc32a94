"""Unpacks the archive of an adapter that was trained elsewhere. Loads no weights."""

import json
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from tuneship.parity import PARITY_FILE
from tuneship.template import (
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    PromptTemplate,
    TemplateFailed,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What is taken; other files, e.g. a README, are passed over.
KEPT = (CONFIG, WEIGHTS, PARITY_FILE, TEMPLATE_FILE, SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE)
PICKLE = "adapter_model.bin"
# The files beside the weights are read as a whole.
MAX_TEXT_BYTES = 16 << 20


class AdapterFault(Exception):
    """The adapter cannot be taken; the message continues a sentence that begins with it."""


def unpack(file: BinaryIO, folder: Path) -> None:
    """Write the files of a tar archive that are needed into an empty folder. Raises `AdapterFault` and `OSError`."""
    seen: set[str] = set()
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for entry in archive:
                name = PurePosixPath(entry.name).name
                seen.add(name)
                if name in KEPT:
                    _write(archive, entry, folder / name)
    except (tarfile.TarError, EOFError, ValueError):
        raise AdapterFault("is cut or no tar archive") from None
    if WEIGHTS not in seen and PICKLE in seen:
        raise AdapterFault(
            "has its weights as a pickle only, which can run code when it is read: save it as safetensors first"
        )
    if missing := [name for name in (CONFIG, WEIGHTS) if name not in seen]:
        raise AdapterFault(f"has no {missing[0]}")
    # The template is kept as our own trainings do, although a tokenizer's settings may hold it.
    settings = folder / TOKENIZER_CONFIG_FILE
    try:
        held = settings.is_file() and "chat_template" in _object(settings)
        if held or (folder / TEMPLATE_FILE).is_file():
            PromptTemplate.load(folder).save(folder)
        else:
            (folder / SPECIAL_TOKENS_FILE).unlink(missing_ok=True)
    except (TemplateFailed, ValueError, KeyError, TypeError, AttributeError):
        raise AdapterFault("has a chat template that cannot be read") from None
    settings.unlink(missing_ok=True)


def _write(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
    if not entry.isreg() or entry.issparse():
        raise AdapterFault(f"cannot be read: its {path.name} is no plain file")
    if path.name != WEIGHTS and entry.size > MAX_TEXT_BYTES:
        raise AdapterFault(
            f"cannot be read: its {path.name} is larger than {MAX_TEXT_BYTES >> 20} MiB"
        )
    content = archive.extractfile(entry)
    if content is None or path.exists():
        raise AdapterFault(f"has more than one {path.name}")
    with content, path.open("xb") as written:
        shutil.copyfileobj(content, written)
    if path.stat().st_size != entry.size:
        raise AdapterFault("is cut or no tar archive")


def named_base(folder: Path) -> str:
    """The base model that the adapter's configuration names; empty without one. Raises `AdapterFault`."""
    return str(_object(folder / CONFIG).get("base_model_name_or_path") or "")


def _object(file: Path) -> dict[str, Any]:
    try:
        read: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise AdapterFault(f"cannot be read: its {file.name} is damaged")
    return cast("dict[str, Any]", read)
