"""Each test has a database of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tuneship.store.database import Database, sqlite_url


@pytest.fixture
def database(tmp_path: Path, database_settings: Callable[[], dict[str, str]]) -> Iterator[Database]:
    chosen = {"database_url": sqlite_url(tmp_path / "db.sqlite"), **database_settings()}
    opened = Database(chosen["database_url"])
    yield opened
    opened.close()
