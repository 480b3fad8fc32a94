"""How far a long task is, for whoever watches: a script draws a bar; a worker has its logs and artifacts instead.

Knows no terminal. The one listener is set by `flows/script/main.py`.
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
    """Tell `listener` about all progress of this process from now on."""
    _listeners.append(listener)


def report(work: str, done: float, total: float, detail: str = "") -> None:
    """Tell whoever listens."""
    for listener in _listeners:
        listener(TaskProgress(work, done, total, detail))
