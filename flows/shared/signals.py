"""Signals of a run: the first one stops it; later ones do not interrupt the clean-up.

Next: `flows/script/main.py` gives a stopped script its exit code.
"""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal stopped the script. Like KeyboardInterrupt it is no Exception, so that no handler catches it by
    mistake.
    """

    def __init__(self, signal_number: int) -> None:
        """Remember which signal it was."""
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


@contextmanager
def uninterrupted() -> Generator[None]:
    """Ignore SIGINT and SIGTERM while the block cleans up; they are not delivered later, because the run is ending."""
    # Python allows only the main thread to set handlers; a worker may run a flow's clean-up in another one.
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
    """Ignore signals from now on: while Python exits, one would replace the exit code."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def stop_once(say: Callable[[str], None], stopping: Callable[[], None] | None = None) -> None:
    """Make the first SIGINT or SIGTERM raise `Stopped` in the main thread; later ones only print a line.

    `stopping` is called before that, in the middle of whatever the main thread does.
    """
    received: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            say("already stopping: the clean-up continues")
            return
        if stopping is not None:
            stopping()
        raise Stopped(number)

    for number in STOPPING:
        signal.signal(number, stop)
