"""The files of a data directory belong to the rows of one database. With another they would all pass for leftovers.

Recovery removes files without a row, so a service that is pointed at a new database must not start on old files.
"""

from pathlib import Path

import sqlalchemy as sa

from tuneship.store.database import SQLITE_FILE, url_of
from tuneship.store.private_files import write_private

RECORD = "database"
OWN = "sqlite in this directory"


class FilesOfAnotherDatabase(Exception):
    """Says which database the files belong to, and what may be done."""


def check_belonging(data_dir: Path, url: str) -> None:
    """Raises `FilesOfAnotherDatabase` when the files were written beside another one. Before anything is opened."""
    record, given = data_dir / RECORD, _name(url, data_dir)
    unwritten = OWN if (data_dir / SQLITE_FILE).exists() else given
    known = record.read_text().strip() if record.is_file() else unwritten
    if known != given:
        raise FilesOfAnotherDatabase(
            f"the files in {data_dir} belong to the database {known!r}, not to {given!r}: name that "
            f"one, or another data directory; when the database itself has moved, remove {record}"
        )


def record_belonging(data_dir: Path, url: str) -> None:
    """Write down which database it is, once that has been opened: a mistyped first URL binds nothing."""
    write_private(data_dir / RECORD, _name(url, data_dir) + "\n")


def _name(url: str, data_dir: Path) -> str:
    """Where a database is, without user and password; a data directory may be moved with its own file."""
    if url == url_of(None, data_dir):
        return OWN
    parsed = sa.make_url(url)
    host = parsed.host or parsed.query.get("host", "")
    port = f":{parsed.port}" if parsed.port else ""
    return f"{parsed.get_backend_name()}://{host}{port}/{parsed.database}"
