"""Progress of long tasks, reported to listeners: a script shows it; a worker has its logs and artifacts instead.

It knows no terminal. `flows/script/main.py` sets the only listener.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TaskProgress:
    """`done` of `total` units of one piece of work; `detail` is a short text for people, never from a dataset.

    `measures`: numbers of the moment by their names, such as losses. `is_bytes`: the units are bytes.
    """

    work: str
    done: float
    total: float
    detail: str = ""
    measures: Mapping[str, float] = field(default_factory=dict[str, float])
    is_bytes: bool = False


_listeners: list[Callable[[TaskProgress], None]] = []


def listen(listener: Callable[[TaskProgress], None]) -> None:
    """Call `listener` with all progress of this process from now on."""
    _listeners.append(listener)


def report(work: str, done: float, total: float, detail: str = "", **measures: float) -> None:
    """Report progress to the listeners."""
    for listener in _listeners:
        listener(TaskProgress(work, done, total, detail, measures))


def bytes_of(work: str) -> Callable[[int, int], None]:
    """A function that reports how many bytes of a file have been sent, and how many it has: `Options.progress`."""

    def sent(done: int, total: int) -> None:
        for listener in _listeners:
            listener(TaskProgress(work, done, total, is_bytes=True))

    return sent
