"""Signals of a run: the first one stops it, and none may break the clean-up that follows.

Next: `flows/script/main.py` gives a stopped script its exit code.
"""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A script was told to stop. Like KeyboardInterrupt not an Exception: nothing may take it for a failure."""

    def __init__(self, signal_number: int) -> None:
        """Remember which signal it was."""
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


@contextmanager
def uninterrupted() -> Generator[None]:
    """Hold back SIGINT and SIGTERM while the block cleans up. They are ignored, not postponed: the run is ending."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_stops() -> None:
    """For good: nothing is left to stop, and while Python ends a signal would take the exit code's place."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def stop_once(say: Callable[[str], None]) -> None:
    """From now on the first SIGINT or SIGTERM raises `Stopped` in the main thread; later ones only say so."""
    received: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            say("already stopping: the clean-up goes on")
            return
        raise Stopped(number)

    for number in STOPPING:
        signal.signal(number, stop)
