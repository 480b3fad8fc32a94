"""A log that was cut, damaged or removed after a kill is noticed; one that is whole, or not needed, is not reported."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tuneship.store.installation.cut_log import lost_pages

WRITER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.executescript("pragma journal_mode=wal; create table entries (text); pragma wal_checkpoint(truncate)")
for number in range(50):
    connection.execute("insert into entries values (?)", [f"{number}" * 500])
connection.executescript(sys.argv[2])
print("written", flush=True)
sys.stdin.read()
"""
COPIED, EMPTIED = "pragma wal_checkpoint(passive)", "pragma wal_checkpoint(truncate)"
Damage = Callable[[Path, Path], None]


def nothing(log: Path, index: Path) -> None:
    pass


def removed(log: Path, index: Path) -> None:
    log.unlink()


def emptied(log: Path, index: Path) -> None:
    os.truncate(log, 0)


def cut(log: Path, index: Path) -> None:
    os.truncate(log, max(0, log.stat().st_size - 1))


def changed(log: Path, index: Path) -> None:
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)


def index_removed(log: Path, index: Path) -> None:
    index.unlink()


def index_of_noise(log: Path, index: Path) -> None:
    index.write_bytes(os.urandom(32_768))


@pytest.mark.parametrize(
    ("before", "damage", "is_lost"),
    [
        ("", nothing, False),
        ("", removed, True),
        ("", emptied, True),
        ("", cut, True),
        ("", changed, True),
        # The index alone is no loss: SQLite makes it again from the log.
        ("", index_removed, False),
        ("", index_of_noise, False),
        # The database file holds everything, but a log that ends too early hides a part of it.
        (COPIED, removed, False),
        (COPIED, emptied, False),
        (COPIED, cut, True),
        (EMPTIED, nothing, False),
        (EMPTIED, removed, False),
    ],
)
def test_a_killed_process_leaves_a_log_whose_losses_are_counted_once(
    tmp_path: Path, before: str, damage: Damage, is_lost: bool
) -> None:
    file = tmp_path / "rows.sqlite"
    command = [sys.executable, "-c", WRITER, file, before]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.kill()
    damage(file.with_name("rows.sqlite-wal"), file.with_name("rows.sqlite-shm"))
    assert (lost_pages(file) > 0) == is_lost
    assert lost_pages(file) == 0


def test_an_older_index_beside_a_newer_log_proves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rows.sqlite"
    log, index = (file.with_name(f"rows.sqlite-{name}") for name in ("wal", "shm"))
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.executescript("pragma journal_mode=wal; create table entries (text)")
        for number in range(50):
            connection.execute("insert into entries values (?)", [f"{number}" * 500])
        of_earlier = index.read_bytes()
        connection.execute(COPIED).fetchall()
        connection.execute("insert into entries values ('newer')")
        kept = {one: one.read_bytes() for one in (file, log)} | {index: of_earlier}
    for one, content in kept.items():
        one.write_bytes(content)
    assert lost_pages(file) == 0
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("select count(*) from entries").fetchone() == (51,)


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "rows.sqlite-shm").write_bytes(bytes(32_768))
    assert lost_pages(tmp_path / "rows.sqlite") == 0
    assert not (tmp_path / "rows.sqlite").exists()
