"""Writers take turns in the order of asking, and a writer that must not wait is the next one."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S, until
from tests.unit.store.database.test_rows import new_row
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.write_queue import TurnTimedOut, WriteQueue


class Queue:
    """Threads that wait for their turn one behind the other, and the order in which they had it."""

    def __init__(self) -> None:
        self.turns = WriteQueue()
        self.order: list[str] = []
        self._threads: list[threading.Thread] = []

    def join(self, name: str, **options: Any) -> None:
        before = len(self.turns._waiting)

        def take() -> None:
            with self.turns.turn(PATIENCE_S, **options):
                self.order.append(name)

        self._threads.append(threading.Thread(target=take))
        self._threads[-1].start()
        until(lambda: len(self.turns._waiting) > before)

    def end(self) -> list[str]:
        for thread in self._threads:
            thread.join()
        return self.order


def test_turns_come_in_the_order_of_asking_and_the_first_ahead_of_all() -> None:
    queue = Queue()
    with queue.turns.turn(0):
        for name in "abcdef":
            queue.join(name)
        queue.join("lease", first=True)
        queue.join("g")
    assert queue.end() == ["lease", *"abcdefg"]


def test_a_writer_that_gives_up_leaves_the_queue_to_the_others() -> None:
    queue = Queue()
    with queue.turns.turn(0):
        queue.join("a")
        with pytest.raises(TurnTimedOut), queue.turns.turn(0.01):
            pass
        queue.join("b")
    assert queue.end() == ["a", "b"]
    # The queue is free again.
    with queue.turns.turn(0):
        pass


def test_a_block_that_fails_passes_the_turn_on() -> None:
    turns = WriteQueue()
    with pytest.raises(RuntimeError, match="planted"), turns.turn(0):
        raise RuntimeError("planted")
    with turns.turn(0):
        pass


def test_no_turn_is_lost_when_patience_ends_as_the_turn_comes() -> None:
    turns, had = WriteQueue(), list[int]()

    def work() -> None:
        for _ in range(300):
            try:
                with turns.turn(0.0002):
                    had.append(1)
            except TurnTimedOut:
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert had
    with turns.turn(0):
        pass


@pytest.mark.both_databases
def test_a_lease_is_written_ahead_of_32_requests_that_wait_for_the_database(
    database: Database,
) -> None:
    written: list[str] = []

    def write(identifier: str, *, first: bool) -> Callable[[], None]:
        def work() -> None:
            with database.write(first=first) as connection:
                written.append(identifier)
                row = new_row(tables.jobs, identifier, "alice")
                rows.insert(connection, tables.jobs, row)

        return work

    requests = [threading.Thread(target=write(f"ft_{n}", first=False)) for n in range(32)]
    lease = threading.Thread(target=write("ft_lease", first=True))
    with database.write():
        for thread in requests:
            thread.start()
        until(lambda: len(database._turns._queues[None]._waiting) == 32)
        lease.start()
        until(lambda: len(database._turns._queues[None]._waiting) == 33)
    for thread in (*requests, lease):
        thread.join()
    assert written[0] == "ft_lease"
    assert len(written) == 33


@pytest.mark.both_databases
def test_a_lease_has_a_connection_when_all_others_are_taken(database: Database) -> None:
    pool: Any = database.engine.pool
    with ExitStack() as taken:
        for _ in range(pool.size() + pool._max_overflow):
            taken.enter_context(database.engine.connect())
        with database.read(first=True) as connection:
            assert rows.count(connection, tables.jobs) == 0
        with database.write(first=True) as connection:
            rows.insert(connection, tables.jobs, new_row(tables.jobs, "ft_1", "alice"))
