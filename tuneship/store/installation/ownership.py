"""Checks that a data directory and a database belong together, by a record in `<data dir>/database`.

The record holds the name and the id of the database and the number of service starts; id and starts are also in a row
of the database. A service starts only if both agree. Beside another database, an emptied one, or an older or newer
copy, files would look like leftovers, and rows would name files that do not exist.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tuneship.contract.common import count
from tuneship.host.durable import write_private
from tuneship.host.startup import StartupError
from tuneship.store.database.database import SQLITE_FILE, parsed_url, url_of
from tuneship.store.files.blobs import KINDS
from tuneship.store.files.local_blobs import FOLDER, object_folders
from tuneship.store.installation.installation import FoundDatabase

RECORD = "database"
OWN = "sqlite in this directory"
IDENTITY = re.compile(r"^\s*id (\S+)\s*$", re.MULTILINE)
STARTS = re.compile(r"^\s*starts (\d+)\s*$", re.MULTILINE)


class FilesOfAnotherDatabase(StartupError):
    """The files belong to another database; the message says to which, and what to do."""


class DatabaseIsEmpty(StartupError):
    """The data directory was used before, but the database is missing or empty."""


@dataclass(frozen=True)
class OwnershipRecord:
    """The id and the starts in `<data dir>/database`, which also has the database's name, for people."""

    id: str
    # Number of starts; None if an operator has written the file, and then only the id is compared.
    starts: int | None = None


def read_record(data_dir: Path) -> OwnershipRecord | None:
    """Read the record of a data directory; None before the first start, and where it was lost."""
    file = data_dir / RECORD
    text = file.read_text() if file.is_file() else ""
    identity, starts = IDENTITY.search(text), STARTS.search(text)
    if identity is None:
        return None
    return OwnershipRecord(identity[1], None if starts is None else int(starts[1]))


def check_name(data_dir: Path, url: str) -> None:
    """Raises `FilesOfAnotherDatabase` for another database than the one that lies in a directory without a record.

    Call it before connecting, since the URL may name somebody else's server. If an id is recorded, only
    `check_ownership` can decide.
    """
    given, file = name_of(url, data_dir), data_dir / SQLITE_FILE
    if read_record(data_dir) is None and given != OWN and file.exists():
        raise FilesOfAnotherDatabase(
            f"the files in {data_dir} belong to the database {OWN!r}, not to {given!r}: name that "
            f"one, or another data directory; when the database itself has moved, move {file} away"
        )


def check_ownership(data_dir: Path, url: str, found: FoundDatabase) -> None:
    """Raises `StartupError` if database and files do not belong together; call it before changing the database."""
    record, name = read_record(data_dir), name_of(url, data_dir)
    if not found.is_used:
        files = files_in(data_dir)
        if files:
            raise DatabaseIsEmpty(
                f"the database {name!r} is missing or empty, but {data_dir} holds the files of "
                f"{count(len(files), 'dataset, model or job', 'datasets, models or jobs')}: restore the database "
                "(docs/operations.md), or name an empty data directory"
            )
        if record is not None:
            raise DatabaseIsEmpty(
                f"the database {name!r} is missing or empty, but a service has worked on {data_dir}: "
                f"restore the database (docs/operations.md), or remove {data_dir / RECORD} to begin "
                "again, without the API keys, the audit chain and everything else that was in it"
            )
    elif record is not None:
        _check_pair(data_dir, record, found, name)
    elif record is None and found.starts and name != OWN:
        raise FilesOfAnotherDatabase(
            f"the database {name!r} is used with another data directory than {data_dir}: name that "
            f"directory; if this is it, and its file {RECORD!r} was lost, {_override(data_dir, found)}"
        )


def check_membership(data_dir: Path, url: str, found: FoundDatabase) -> None:
    """Raises `StartupError` if a member of a cluster has worked on the data directory with another database.

    A directory without a record is that of a new member.
    """
    record, name = read_record(data_dir), name_of(url, data_dir)
    if record is not None and found.id is None:
        raise DatabaseIsEmpty(
            f"the database {name!r} is missing or empty, but a service has worked on {data_dir}: restore the database "
            f"(docs/operations.md), or remove {data_dir / RECORD} to begin again"
        )
    if record is not None and record.id != found.id:
        raise FilesOfAnotherDatabase(
            f"the files in {data_dir} belong to the database with the id {record.id}, and {name!r} is another one "
            f"({found.id}): name the right database or data directory"
        )


def _check_pair(data_dir: Path, record: OwnershipRecord, found: FoundDatabase, name: str) -> None:
    """Compare id and starts of the record with those of the database. Raises `FilesOfAnotherDatabase`."""
    if found.id != record.id:
        raise FilesOfAnotherDatabase(
            f"the files in {data_dir} belong to the database with the id {record.id}, and {name!r} "
            f"is another one ({found.id}): name the right database or data directory; {_override(data_dir, found)}"
        )
    if record.starts is None:
        return
    # The file is written before the row, so a kill in between leaves the row one start behind.
    if found.starts < record.starts - 1:
        raise FilesOfAnotherDatabase(
            f"the database {name!r} is older than the files in {data_dir} ({count(found.starts, 'start')}, "
            f"not {record.starts}): restore the newest database (docs/operations.md); "
            f"{_override(data_dir, found)}"
        )
    if found.starts > record.starts:
        raise FilesOfAnotherDatabase(
            f"the files in {data_dir} are older than the database {name!r} ({count(record.starts, 'start')}, "
            f"not {found.starts}), or it was used with another data directory: name the newest; "
            f"{_override(data_dir, found)}"
        )


def _override(data_dir: Path, found: FoundDatabase) -> str:
    """The end of an error message: how an operator declares that the two belong together after all."""
    file = data_dir / RECORD
    return f"to use the two together all the same, write only the line 'id {found.id}' into {file}"


def files_in(data_dir: Path) -> set[str]:
    """The folders of datasets, models and jobs in a data directory, e.g. `datasets/ds_…` or `work/ft_…`."""
    objects = object_folders(data_dir / FOLDER, KINDS)
    return {f"{folder.parent.name}/{folder.name}" for folder in objects} | work_in(data_dir)


def work_in(data_dir: Path) -> set[str]:
    """The folders of jobs in a data directory, e.g. `work/ft_…`."""
    return {f"work/{folder.name}" for folder in object_folders(data_dir, ("work",))}


def record_ownership(data_dir: Path, url: str, identity: str, starts: int | None) -> None:
    """Write the record: the files belong to the database at `url`. Raises `OSError`.

    `starts`: None in a cluster, whose members do not count theirs.
    """
    lines = [name_of(url, data_dir), f"id {identity}"]
    if starts is not None:
        lines.append(f"starts {starts}")
    write_private(data_dir / RECORD, "\n".join(lines) + "\n")


def name_of(url: str, data_dir: Path) -> str:
    """Name a database without user and password.

    The SQLite file in the data directory has a fixed name, so that the directory can be moved as a whole.
    """
    if url == url_of(None, data_dir):
        return OWN
    parsed = parsed_url(url)
    hosts = parsed.host or parsed.query.get("host", "")
    host = hosts if isinstance(hosts, str) else ",".join(hosts)
    port = f":{parsed.port}" if parsed.port else ""
    return f"{parsed.get_backend_name()}://{host}{port}/{parsed.database}"
