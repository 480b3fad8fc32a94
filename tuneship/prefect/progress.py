"""Progress of long tasks, reported to listeners: a script draws a bar; a worker has its logs and artifacts instead.

It knows no terminal. `flows/script/main.py` sets the only listener.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskProgress:
    """`done` of `total` units of one piece of work; `detail` is a short text for people, never from a dataset."""

    work: str
    done: float
    total: float
    detail: str = ""


_listeners: list[Callable[[TaskProgress], None]] = []


def listen(listener: Callable[[TaskProgress], None]) -> None:
    """Call `listener` with all progress of this process from now on."""
    _listeners.append(listener)


def report(work: str, done: float, total: float, detail: str = "") -> None:
    """Report progress to the listeners."""
    for listener in _listeners:
        listener(TaskProgress(work, done, total, detail))
