"""Wakes readers that wait for news of a resource, in this process and at the other members of a cluster."""

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Notifier:
    """Wakes readers that wait for news of a resource. Only a hint: they read the rows, and poll in any case."""

    def __init__(self) -> None:
        """Start without listeners."""
        self._lock = threading.Lock()
        self._waiting: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    def notify(self, resource_id: str) -> None:
        """Wake the listeners of a resource. Called after a commit, from any thread."""
        self.wake(resource_id)

    def wake(self, resource_id: str) -> None:
        """Wake the listeners in this process."""
        with self._lock:
            woken = list(self._waiting.get(resource_id, ()))
        for loop, event in woken:
            loop.call_soon_threadsafe(event.set)

    def wake_all(self) -> None:
        """Wake all listeners, because the changed resource is unknown."""
        for resource_id in list(self._waiting):
            self.wake(resource_id)

    @contextmanager
    def listening(self, resource_id: str) -> Generator[asyncio.Event]:
        """An event that every notification sets. Clear it before reading the rows, so that no news is missed."""
        event = asyncio.Event()
        waiting = (asyncio.get_running_loop(), event)
        with self._lock:
            self._waiting.setdefault(resource_id, set()).add(waiting)
        try:
            yield event
        finally:
            with self._lock:
                self._waiting[resource_id].discard(waiting)
                if not self._waiting[resource_id]:
                    del self._waiting[resource_id]


class SharedNotifier(Notifier):
    """The notifier of a member of a cluster, which also notifies the others."""

    def __init__(self, publish: Callable[[str], None]) -> None:
        """`publish` passes the id of a resource to the other members."""
        super().__init__()
        self._publish = publish

    def notify(self, resource_id: str) -> None:
        """Wake the listeners of a resource, here and at the other members."""
        self.wake(resource_id)
        self._publish(resource_id)
