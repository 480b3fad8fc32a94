"""Calls that are repeated in threads while a test does something else."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event


@contextmanager
def repeating(*calls: Callable[[], object], pause_s: float = 0.0) -> Iterator[None]:
    """Repeat each call in a thread of its own until the block ends; then raise what one of them has raised."""
    is_over = Event()

    def repeat(call: Callable[[], object]) -> None:
        while not is_over.wait(pause_s):
            call()

    with ThreadPoolExecutor(len(calls)) as threads:
        running = [threads.submit(repeat, call) for call in calls]
        try:
            yield
        finally:
            is_over.set()
        for one in running:
            one.result()
