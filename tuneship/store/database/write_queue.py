"""A fair lock for writers: first come, first served, except that urgent writers go first.

A plain lock is not fair: among 32 threads that keep taking it, one may never get it in time.
"""

import threading
from collections import Counter, deque
from collections.abc import Generator
from contextlib import contextmanager


class TurnTimedOut(Exception):
    """The timeout passed before the lock was free."""


# Whether the present thread holds a turn, by an attribute that only such a thread has.
_writing = threading.local()


def refuse_while_writing() -> None:
    """Raise `AssertionError` in a thread that holds a turn: slow work must not block other writers."""
    if getattr(_writing, "is_holding", False):
        raise AssertionError("files are fetched before a write transaction, never inside one")


class WriteQueue:
    """A fair lock with one holder at a time."""

    def __init__(self) -> None:
        """Start free."""
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def turn(self, timeout_s: float, *, first: bool = False) -> Generator[None]:
        """Hold the lock for the block; `first`: ahead of all others that wait. Raises `TurnTimedOut`."""
        self._acquire(timeout_s, first=first)
        outer = getattr(_writing, "is_holding", False)
        _writing.is_holding = True
        try:
            yield
        finally:
            _writing.is_holding = outer
            with self._lock:
                # The lock stays taken and passes to the next in the queue, so that nobody can overtake it.
                if self._waiting:
                    self._waiting.popleft().set()
                else:
                    self._is_taken = False

    def _acquire(self, timeout_s: float, *, first: bool) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            ticket = threading.Event()
            if first:
                self._waiting.appendleft(ticket)
            else:
                self._waiting.append(ticket)
        if ticket.wait(timeout_s):
            return
        with self._lock:
            if ticket.is_set():  # the lock was passed to us between the timeout and here
                return
            self._waiting.remove(ticket)
        raise TurnTimedOut


class WriteQueues:
    """Fair locks by name; a lock exists only while a thread holds it or waits for it."""

    def __init__(self) -> None:
        """Start without any."""
        self._lock = threading.Lock()
        self._queues: dict[str | None, WriteQueue] = {}
        self._users: Counter[str | None] = Counter()

    @contextmanager
    def turn(self, name: str | None, timeout_s: float, *, first: bool = False) -> Generator[None]:
        """Hold the lock of this name for the block; `first`: ahead of all others that wait. Raises `TurnTimedOut`."""
        with self._lock:
            queue = self._queues.setdefault(name, WriteQueue())
            self._users[name] += 1
        try:
            with queue.turn(timeout_s, first=first):
                yield
        finally:
            with self._lock:
                self._users[name] -= 1
                if not self._users[name]:
                    del self._users[name], self._queues[name]
