"""New SQLite databases for tests, each a copy of one that was migrated once: migrating takes longer than most tests."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tuneship.store.database.database import Database, sqlite_url


@cache
def _migrated() -> bytes:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "template.sqlite"
        Database(sqlite_url(file)).close()
        return file.read_bytes()


def new_sqlite(file: Path) -> str:
    """Make a migrated database at a path where there is none yet, and return its URL."""
    with file.open("xb") as opened:
        opened.write(_migrated())
    return sqlite_url(file)
