"""Whose turn it is to write: in the order of asking, and ahead of everybody for whoever must not wait.

A plain lock is fair to nobody: of 32 threads that ask again and again, one may come last each time.
"""

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager


class TurnTimedOut(Exception):
    """The patience was over before the turn came."""


class WriteQueue:
    """One holder at a time."""

    def __init__(self) -> None:
        """Nobody holds the turn."""
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def turn(self, patience_s: float, *, first: bool = False) -> Generator[None]:
        """Hold the turn for the block. `first`: be the next, whoever else waits. Raises `TurnTimedOut`."""
        self._take(patience_s, first=first)
        try:
            yield
        finally:
            with self._lock:
                self._pass_on()

    def _take(self, patience_s: float, *, first: bool) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            ticket = threading.Event()
            if first:
                self._waiting.appendleft(ticket)
            else:
                self._waiting.append(ticket)
        if ticket.wait(patience_s):
            return
        with self._lock:
            if ticket.is_set():  # it came at the last moment
                return
            self._waiting.remove(ticket)
        raise TurnTimedOut

    def _pass_on(self) -> None:
        """The turn goes from hand to hand, so nobody can overtake those who wait."""
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._is_taken = False
