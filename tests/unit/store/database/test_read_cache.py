"""A value is cached until the next write, and a value older than a finished write is never returned."""

import threading
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa

from tuneship.store.database import tables
from tuneship.store.database.database import Database
from tuneship.store.database.read_cache import MAX_AGE_S, ReadCache, SharedReadCache
from tuneship.store.records.outbox import emit

pytestmark = pytest.mark.both_databases

NOW = datetime(2026, 7, 1, tzinfo=UTC)


def write(database: Database) -> None:
    with database.write() as connection:
        emit(connection, "dataset.uploaded", {"id": "ds_1", "client_id": "alice"}, NOW)


def count(database: Database) -> int:
    with database.read() as connection:
        return connection.execute(
            sa.select(sa.func.count()).select_from(tables.events)
        ).scalar_one()


def test_a_value_is_read_once_between_two_writes(database: Database) -> None:
    cache = database.cache
    assert cache.find("events") is None
    assert cache.read("events", lambda: count(database)) == 0
    assert cache.find("events") == 0
    write(database)
    assert cache.find("events") is None
    assert cache.read("events", lambda: count(database)) == 1


def test_a_write_that_fails_clears_it_too(database: Database) -> None:
    """The commit of a failed write may still be in force."""
    database.cache.read("events", lambda: count(database))
    with pytest.raises(ZeroDivisionError), database.write():
        _ = 1 / 0
    assert database.cache.find("events") is None


def test_a_write_to_tables_that_nobody_keeps_leaves_it(database: Database) -> None:
    database.cache.read("events", lambda: count(database))
    with database.write(clears=False):
        pass
    assert database.cache.find("events") == 0


def test_a_value_read_before_a_write_that_arrives_after_it_is_not_kept(database: Database) -> None:
    has_read, may_return = threading.Event(), threading.Event()

    def slowly() -> int:
        found = count(database)
        has_read.set()
        assert may_return.wait(60)
        return found

    reader = threading.Thread(target=database.cache.read, args=["events", slowly])
    reader.start()
    assert has_read.wait(60)
    write(database)
    may_return.set()
    reader.join()
    assert database.cache.find("events") is None


def test_neither_an_error_nor_an_absent_row_is_kept(database: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        database.cache.read("events", lambda: 1 // 0)
    assert database.cache.read("events", lambda: None) is None
    assert database.cache.read("events", lambda: 7) == 7
    assert database.cache.find("events") == 7


def test_it_holds_so_many_values_and_no_more() -> None:
    cache = ReadCache(max_values=3)
    cache.read(0, lambda: None)
    for number in range(1, 5):
        cache.read(number, lambda number=number: number)
    assert [cache.find(number) for number in range(1, 5)] == [None, None, None, 4]


def test_rows_others_may_change_are_dropped_at_their_news_and_after_a_second() -> None:
    """A value is as old as the begin of its reading: what was committed later may not be in it."""
    now, published = [0.0], list[str]()
    cache = SharedReadCache(lambda: published.append("changed"), lambda: now[0])

    def slow() -> str:
        now[0] += MAX_AGE_S / 2
        return "value"

    assert cache.read("key", slow) == cache.find("key") == "value"
    now[0] += MAX_AGE_S / 2
    assert cache.find("key") is None
    assert cache.read("key", lambda: None) is None
    assert cache.find("key") is None

    cache.read("key", lambda: "value")
    cache.drop()
    assert (cache.find("key"), published) == (None, [])
    cache.read("key", lambda: "value")
    cache.clear()
    assert (cache.find("key"), published) == (None, ["changed"])


def test_listeners_hear_of_writes_that_clear_it_once_those_are_committed(
    database: Database,
) -> None:
    heard: list[int] = []
    with database.listening(lambda: heard.append(count(database))):
        write(database)
        with database.write(clears=False):
            pass
        with database.write_beside():
            pass
        # A copy behind a fence is the same database.
        write(database.fenced(lambda _: None))
    write(database)
    assert heard == [1, 2]


def test_listeners_for_a_tenant_hear_of_its_rows_and_of_writes_beside(
    database: Database,
) -> None:
    heard: list[str] = []
    wake, note = (lambda: heard.append("rows")), (lambda: heard.append("beside"))
    with database.listening(wake, tenant="alice", beside=note):
        for tenant in ("bob", "alice", None):
            with database.write(tenant):
                heard.append(f"of {tenant}")
        with database.fenced(lambda _: None).write_beside():
            pass
    with database.write("alice"):
        pass
    with database.write_beside():
        pass
    assert heard == ["of bob", "of alice", "rows", "of None", "rows", "beside"]
