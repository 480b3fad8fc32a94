"""Folders as tar archives: an adapter's on its way to the service, and the one that a download becomes."""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import BinaryIO, cast

from tuneship.client.uploads import discard
from tuneship.contract.errors import SourceError

# What is sent of an adapter's folder; the service needs nothing else.
WEIGHTS = "adapter_model.safetensors"
SENT = (
    *("adapter_config.json", WEIGHTS, "chat_template.jinja"),
    *("special_tokens_map.json", "tokenizer_config.json", "tokenizer.json", "added_tokens.json"),
)
NAMED_TEMPLATES = "additional_chat_templates"


@contextmanager
def archive_of(folder: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """An open archive of an adapter's folder. Raises `SourceError`."""
    path = Path(folder)
    if not path.is_dir():
        raise SourceError(f"{path}: no such directory")
    if not (path / WEIGHTS).is_file():
        has_pickle = (path / "adapter_model.bin").is_file()
        raise SourceError(
            f"{path}: its weights are a pickle only, which can run code when it is read: save it as safetensors first"
            if has_pickle
            else f"{path}: has no {WEIGHTS}"
        )
    spool = TemporaryFile()  # noqa: SIM115 - closing it may fail
    try:
        with tarfile.open(fileobj=spool, mode="w") as archive:
            named = sorted((path / NAMED_TEMPLATES).glob("*.jinja"))
            for name in (*SENT, *(f"{NAMED_TEMPLATES}/{file.name}" for file in named)):
                if (path / name).is_file():
                    archive.add(path / name, name, filter=_without_owner)
        spool.seek(0)
    except OSError as error:
        discard(spool)
        raise SourceError(f"{path}: cannot be read or copied ({error.strerror})") from None
    try:
        yield cast("BinaryIO", spool)
    finally:
        discard(spool)


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    # A repeated call must send the same bytes, and nobody's name.
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def _extract(archive: tarfile.TarFile, entry: tarfile.TarInfo, folder: Path) -> None:
    # Not `extractall(filter="data")`: Python 3.11.2, which is Debian 12's, has no filters yet.
    name = PurePosixPath(entry.name)
    if name.is_absolute() or ".." in name.parts:
        raise ValueError
    path = folder / name
    if entry.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    content = archive.extractfile(entry) if entry.isfile() else None
    if content is None:  # a link or a device
        raise ValueError
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, path.open("xb") as file:
        shutil.copyfileobj(content, file)


@contextmanager
def downloaded(target: Path) -> Generator[tuple[BinaryIO, Callable[[], None]]]:
    """Yield a file for the archive, and a function that unpacks it into the folder `target`. Raises `SourceError`.

    The folder appears whole or not at all; a full disk or a broken archive leaves nothing.
    """
    if target.exists() or target.is_symlink():
        raise SourceError(f"{target}: exists already")
    part: Path | None = None
    try:
        spool = TemporaryFile(dir=target.absolute().parent)  # noqa: SIM115 - closing it may fail
    except OSError as error:
        raise SourceError(f"{target}: cannot be written ({error.strerror})") from None

    def unpack() -> None:
        nonlocal part
        spool.seek(0)
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.absolute().parent))
        with tarfile.open(fileobj=spool, mode="r:") as archive:
            for entry in archive:
                _extract(archive, entry, part)
        (content,) = part.iterdir()
        content.rename(target)

    try:
        yield cast("BinaryIO", spool), unpack
    except OSError as error:
        raise SourceError(f"{target}: cannot be written ({error.strerror})") from None
    except (tarfile.TarError, ValueError):
        raise SourceError(f"{target}: what the service sent is no archive") from None
    finally:
        discard(spool)
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
