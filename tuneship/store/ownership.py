"""Which database the files of a data directory belong to: its name, its id and how often it was started with them.

They stand in `<data dir>/database`; id and starts also stand in a row of the database. A service starts only when both
sides agree. With another database, an emptied one, or one from another time, files would pass for leftovers and rows
would name files that are not there.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from tuneship.host.durable import write_private
from tuneship.startup import StartupError
from tuneship.store.database import SQLITE_FILE, url_of
from tuneship.store.installation import FoundDatabase

RECORD = "database"
OWN = "sqlite in this directory"
# Of a folder that is a file system of its own.
LOST_FOUND = "lost+found"
# Folders below `blobs`, each with a folder for every object.
KINDS = ("datasets", "models")
IDENTITY = re.compile(r"id (\S+)")
STARTS = re.compile(r"starts (\d+)")


class FilesOfAnotherDatabase(StartupError):
    """Says which database the files belong to, and what may be done."""


class DatabaseIsEmpty(StartupError):
    """There are files, and nothing in the database names them."""


@dataclass(frozen=True)
class OwnershipRecord:
    """What `<data dir>/database` says; versions before the id wrote the name alone."""

    name: str | None = None
    id: str | None = None
    starts: int | None = None
    """None also where an operator has written the file: then only the id is compared."""


def read_record(data_dir: Path) -> OwnershipRecord | None:
    """The record of a data directory; None before its first start."""
    file = data_dir / RECORD
    if not file.is_file():
        return None
    name, identity, starts = None, None, None
    for line in file.read_text().splitlines():
        if found := IDENTITY.fullmatch(line.strip()):
            identity = found[1]
        elif found := STARTS.fullmatch(line.strip()):
            starts = int(found[1])
        elif line.strip():
            name = line.strip()
    return OwnershipRecord(name, identity, starts)


def check_name(data_dir: Path, url: str) -> None:
    """Raises `FilesOfAnotherDatabase` when the files were written beside another one, as far as names can say it.

    Before any connection: it may be somebody else's server. Where the id is known, that one decides.
    """
    record, given = read_record(data_dir) or OwnershipRecord(), name_of(url, data_dir)
    unwritten = OWN if (data_dir / SQLITE_FILE).exists() else given
    known = record.name or unwritten
    if record.id is None and known != given:
        raise FilesOfAnotherDatabase(
            f"the files in {data_dir} belong to the database {known!r}, not to {given!r}: name that "
            f"one, or another data directory; when the database itself has moved, remove "
            f"{data_dir / RECORD}"
        )


def check_ownership(data_dir: Path, url: str, found: FoundDatabase) -> None:
    """Raises `StartupError` when database and files do not belong together. Before the database is changed."""
    record, name = read_record(data_dir), name_of(url, data_dir)
    if not found.is_used:
        _check_new(data_dir, record, name)
    elif record is not None and record.id is not None:
        _check_pair(data_dir, record, found, name)
    elif record is None and found.starts and name != OWN:
        raise FilesOfAnotherDatabase(
            f"the database {name!r} is used with another data directory than {data_dir}: name that "
            f"directory; if this is it, and its file {RECORD!r} was lost, {_way_on(data_dir, found)}"
        )


def _check_new(data_dir: Path, record: OwnershipRecord | None, name: str) -> None:
    files = files_in(data_dir)
    if files:
        raise DatabaseIsEmpty(
            f"the database {name!r} is missing or empty, but {data_dir} holds the files of "
            f"{len(files)} datasets, models or jobs: restore the database (docs/operations.md), or "
            "name an empty data directory"
        )
    if record is not None:
        raise DatabaseIsEmpty(
            f"the database {name!r} is missing or empty, but a service has worked on {data_dir}: "
            f"restore the database (docs/operations.md), or remove {data_dir / RECORD} to begin "
            "again, without the API keys, the audit chain and everything else that was in it"
        )


def _check_pair(data_dir: Path, record: OwnershipRecord, found: FoundDatabase, name: str) -> None:
    if found.id != record.id:
        whose = f"another one ({found.id})" if found.id else "one of an earlier version"
        raise FilesOfAnotherDatabase(
            f"the files in {data_dir} belong to the database with the id {record.id}, and {name!r} "
            f"is {whose}: name the right database or data directory; {_way_on(data_dir, found)}"
        )
    if record.starts is None:
        return
    if found.starts < record.starts - 1:  # the file is written first: a kill between leaves one
        raise FilesOfAnotherDatabase(
            f"the database {name!r} is older than the files in {data_dir} ({found.starts} starts, "
            f"not {record.starts}): restore the newest database (docs/operations.md); "
            f"{_way_on(data_dir, found)}"
        )
    if found.starts > record.starts:
        raise FilesOfAnotherDatabase(
            f"the files in {data_dir} are older than the database {name!r} ({record.starts} starts, "
            f"not {found.starts}), or it was used with another data directory: name the newest; "
            f"{_way_on(data_dir, found)}"
        )


def _way_on(data_dir: Path, found: FoundDatabase) -> str:
    """How an operator says that the two belong together all the same."""
    file = data_dir / RECORD
    if found.id is None:
        return f"to use the two together all the same, remove {file}"
    return f"to use the two together all the same, write only the line 'id {found.id}' into {file}"


def files_in(data_dir: Path) -> set[str]:
    """The folders of datasets, models and jobs in a data directory, e.g. `datasets/ds_…`."""
    places = {kind: data_dir / "blobs" / kind for kind in KINDS} | {"work": data_dir / "work"}
    return {
        f"{kind}/{one.name}"
        for kind, folder in places.items()
        if folder.is_dir()
        for one in folder.iterdir()
        if one.name != LOST_FOUND
    }


def record_ownership(data_dir: Path, url: str, identity: str, starts: int) -> None:
    """Write down which database the files belong to. Raises `OSError`."""
    lines = (name_of(url, data_dir), f"id {identity}", f"starts {starts}")
    write_private(data_dir / RECORD, "\n".join(lines) + "\n")


def name_of(url: str, data_dir: Path) -> str:
    """Where a database is, without user and password; a data directory may be moved with its own file."""
    if url == url_of(None, data_dir):
        return OWN
    parsed = sa.make_url(url)
    host = parsed.host or parsed.query.get("host", "")
    port = f":{parsed.port}" if parsed.port else ""
    return f"{parsed.get_backend_name()}://{host}{port}/{parsed.database}"
