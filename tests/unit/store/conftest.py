"""Each test has a database of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.databases.sqlite_files import new_sqlite
from tuneship.store.database.database import Database


@pytest.fixture
def database(tmp_path: Path, database_settings: Callable[[], dict[str, str]]) -> Iterator[Database]:
    opened = Database(database_settings().get("database_url") or new_sqlite(tmp_path / "db.sqlite"))
    yield opened
    opened.close()
