"""Unpacks the archive of an adapter that was trained elsewhere. Loads no weights."""

import json
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from tuneship.parity import PARITY_FILE
from tuneship.template import (
    NAMED_TEMPLATES_FOLDER,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    PromptTemplate,
    TemplateFailed,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Of the tokenizer that the adapter was trained with: compared with that of the base model, and not kept.
TOKENIZER_FILES = (TOKENIZER_CONFIG_FILE, "tokenizer.json", "added_tokens.json")
# What is taken; other files, e.g. a README, are passed over.
KEPT = (CONFIG, WEIGHTS, PARITY_FILE, TEMPLATE_FILE, SPECIAL_TOKENS_FILE, *TOKENIZER_FILES)
PICKLE = "adapter_model.bin"
# The files beside the weights are read as a whole. The largest are tokenizers.
MAX_TEXT_BYTES = 64 << 20


class AdapterFault(Exception):
    """The adapter cannot be taken; the message continues a sentence that begins with it."""


def unpack(file: BinaryIO, folder: Path) -> None:
    """Write the files of a tar archive that are needed into an empty folder. Raises `AdapterFault` and `OSError`."""
    seen: set[str] = set()
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for entry in archive:
                path = PurePosixPath(entry.name)
                seen.add(path.name)
                if path.name in KEPT:
                    _write(archive, entry, folder / path.name)
                elif path.parent.name == NAMED_TEMPLATES_FOLDER and path.suffix == ".jinja":
                    (folder / NAMED_TEMPLATES_FOLDER).mkdir(exist_ok=True)
                    _write(archive, entry, folder / NAMED_TEMPLATES_FOLDER / path.name)
    except (tarfile.TarError, EOFError, ValueError):
        raise AdapterFault("is cut or no tar archive") from None
    if WEIGHTS not in seen and PICKLE in seen:
        raise AdapterFault(
            "has its weights as a pickle only, which can run code when it is read: save it as safetensors first"
        )
    if missing := [name for name in (CONFIG, WEIGHTS) if name not in seen]:
        raise AdapterFault(f"has no {missing[0]}")


def settle_template(folder: Path, base: Path, template: PromptTemplate, tokenizer: Path) -> None:
    """Keep the adapter's template as our own trainings do, and move the files of its tokenizer away. `AdapterFault`.

    Without a template, it is asked as its base model is, whose template is `template`; special tokens that it does not
    name are those of the base model.
    """
    settings = folder / TOKENIZER_CONFIG_FILE
    try:
        has_own = (folder / TEMPLATE_FILE).is_file()
        has_own = has_own or (settings.is_file() and bool(_object(settings).get("chat_template")))
        found = PromptTemplate.load(folder, base=base)
        if not has_own:
            found = PromptTemplate(template.source, found.special_tokens)
        # In one file, though a tokenizer's settings or several files may hold it.
        found.save(folder)
    except (TemplateFailed, ValueError, KeyError, TypeError, AttributeError):
        raise AdapterFault("has a chat template that cannot be read") from None
    shutil.rmtree(folder / NAMED_TEMPLATES_FOLDER, ignore_errors=True)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.move(folder / name, tokenizer / name)


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
