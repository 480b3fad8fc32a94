"""A fair lock for writers: first come, first served, except that urgent writers go first.

A plain lock is not fair: among 32 threads that keep taking it, one may never get it in time.
"""

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager


class TurnTimedOut(Exception):
    """The timeout passed before the lock was free."""


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
        try:
            yield
        finally:
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
