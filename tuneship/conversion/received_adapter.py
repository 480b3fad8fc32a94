"""Extracts an adapter's files from their archive, and finds its base model. Loads no weights.

All of it is foreign. It is read by the process that checks the adapter alone, never by the service.
"""

import json
import shutil
from pathlib import Path, PurePosixPath
from tarfile import (
    GNUTYPE_LONGLINK,
    GNUTYPE_LONGNAME,
    GNUTYPE_SPARSE,
    SOLARIS_XHDTYPE,
    XGLTYPE,
    XHDTYPE,
    TarError,
    TarFile,
    TarInfo,
)
from typing import Any, Self, cast

from tuneship.conversion.order import ImportOrder
from tuneship.conversion.template_texts import difference_from_base
from tuneship.host.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tuneship.prompts.template import (
    NAMED_TEMPLATES_FOLDER,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TemplateFailed,
)

PICKLE = "adapter_model.bin"
MIB = 1 << 20
# What is read, and how large each may be. Other files, e.g. a README or a parity.json, are passed over.
MAX_BYTES = {
    ADAPTER_CONFIG: MIB,
    TEMPLATE_FILE: MIB,
    SPECIAL_TOKENS_FILE: MIB,
    # Of the tokenizer that the adapter was trained with: compared with that of the base model, and not kept.
    TOKENIZER_CONFIG_FILE: 64 * MIB,
    "tokenizer.json": 64 * MIB,
    "added_tokens.json": 64 * MIB,
}
MAX_ENTRIES = 1000
MAX_NAMED_TEMPLATES = 16
# Headers that go before an entry: long names, and settings whose parsing takes the square of their length on Pythons
# with CVE-2024-6232. tarfile reads them whole.
SETTINGS = frozenset({XHDTYPE, XGLTYPE, SOLARIS_XHDTYPE})
EXTENSIONS = SETTINGS | {GNUTYPE_LONGNAME, GNUTYPE_LONGLINK}
MAX_EXTENSION_BYTES = 4 << 10
NO_TAR = "is cut or no tar archive"


class AdapterFault(Exception):
    """The adapter is refused; the message continues a sentence whose subject is the adapter."""


def received(order: ImportOrder, folder: Path) -> str | None:
    """Unpack the order's archive, which is removed, and return the id of the base model that it is for.

    None where neither the order nor the adapter names one. Raises `AdapterFault` and `OSError`.
    """
    archive = Path(order.archive)
    unpack(archive, folder)
    # The disk need not hold both while the adapter is checked.
    archive.unlink()
    named = str(_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
    if order.base_model is None:
        return named if named in order.bases else None
    if named != order.base_model and named in order.bases:
        raise AdapterFault(f"was trained for the base model {named}")
    return order.base_model


def check_template(base: Path, folder: Path) -> None:
    """Raise `AdapterFault` where the adapter was trained with another chat template than that of its base model."""
    try:
        difference = difference_from_base(base, folder)
    except (TemplateFailed, ValueError, KeyError, TypeError, AttributeError):
        raise AdapterFault("has a chat template that cannot be read") from None
    if difference is not None:
        raise AdapterFault(
            f"has {difference}, and a template is a program, which only an operator may add: have the base model added "
            "a second time with this template (tuneship models add), and import the adapter for that one"
        )


class _BoundedEntry(TarInfo):
    """The header of an entry, refused before tarfile reads on where it is of a kind that has no bounds."""

    @classmethod
    def fromtarfile(cls, tarfile: TarFile) -> Self:
        file: Any = tarfile.fileobj
        start: int = file.tell()
        # Every header costs a call, also those of long names: a stack of them, or a loop, ends here.
        archive = cast("_BoundedArchive", tarfile)
        archive.headers += 1
        if archive.headers > MAX_ENTRIES:
            raise AdapterFault(f"has more than {MAX_ENTRIES} files in its archive")
        entry = cls.frombuf(file.read(512), tarfile.encoding or "utf-8", tarfile.errors or "strict")
        if entry.size < 0:
            raise AdapterFault(NO_TAR)
        is_sparse = entry.type == GNUTYPE_SPARSE
        if entry.type in EXTENSIONS:
            if entry.size > MAX_EXTENSION_BYTES:
                raise AdapterFault(
                    f"has a header of more than {MAX_EXTENSION_BYTES >> 10} KiB in its archive"
                )
            is_sparse = entry.type in SETTINGS and b"GNU.sparse" in file.read(entry.size)
        if is_sparse:
            raise AdapterFault("has a sparse file in its archive")
        file.seek(start)
        return super().fromtarfile(tarfile)


class _BoundedArchive(TarFile):
    """An archive without compression that counts the headers that were read."""

    tarinfo = _BoundedEntry
    headers = 0


def unpack(archive: Path, folder: Path) -> None:
    """Write the files that are needed into an empty folder. Raises `AdapterFault` and `OSError`."""
    seen: set[str] = set()
    try:
        with archive.open("rb") as file, _BoundedArchive(fileobj=file) as entries:
            for entry in entries:
                path = PurePosixPath(entry.name)
                seen.add(path.name)
                if path.name == ADAPTER_WEIGHTS:
                    _write(entries, entry, folder / path.name)
                elif path.name in MAX_BYTES:
                    _write(entries, entry, folder / path.name, MAX_BYTES[path.name])
                elif path.parent.name == NAMED_TEMPLATES_FOLDER and path.suffix == ".jinja":
                    named = folder / NAMED_TEMPLATES_FOLDER
                    named.mkdir(exist_ok=True)
                    if len(list(named.iterdir())) == MAX_NAMED_TEMPLATES:
                        raise AdapterFault(f"has more than {MAX_NAMED_TEMPLATES} chat templates")
                    _write(entries, entry, named / path.name, MIB)
    except (TarError, EOFError, ValueError, RecursionError):
        raise AdapterFault(NO_TAR) from None
    if ADAPTER_WEIGHTS not in seen and PICKLE in seen:
        raise AdapterFault(
            "has its weights as a pickle only, which can run code when it is read: save it as safetensors first"
        )
    if missing := [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if name not in seen]:
        raise AdapterFault(f"has no {missing[0]}")


def _write(archive: TarFile, entry: TarInfo, path: Path, limit: int | None = None) -> None:
    if not entry.isreg() or entry.issparse():
        raise AdapterFault(f"cannot be read: its {path.name:.80} is no plain file")
    if limit is not None and entry.size > limit:
        raise AdapterFault(f"cannot be read: its {path.name:.80} is larger than {limit >> 20} MiB")
    content = archive.extractfile(entry)
    if content is None or path.exists():
        raise AdapterFault(f"has more than one {path.name:.80}")
    with content, path.open("xb") as written:
        shutil.copyfileobj(content, written)
    if path.stat().st_size != entry.size:
        raise AdapterFault(NO_TAR)


def _object(file: Path) -> dict[str, Any]:
    try:
        read: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise AdapterFault(f"cannot be read: its {file.name} is damaged")
    return cast("dict[str, Any]", read)
