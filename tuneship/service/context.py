"""What a handler is given: the service's parts, who asks, and one transaction that the request boundary commits."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa

from tuneship.metrics.recorder import Recorder, WindowKey
from tuneship.metrics.windows import Window
from tuneship.runtime.replicas import ReplicaPool
from tuneship.service.catalogue import Catalogue
from tuneship.service.cursors import Cursors
from tuneship.service.under_way import UnderWay
from tuneship.settings import ServiceSettings
from tuneship.store import metric_windows
from tuneship.store.blobs import Blobs
from tuneship.store.database import Database


@dataclass(frozen=True)
class Parts:
    """Built once in the composition root (`service/serve.py`)."""

    settings: ServiceSettings
    public_url: str
    database: Database
    blobs: Blobs
    catalogue: Catalogue
    recorder: Recorder
    replicas: ReplicaPool
    cursors: Cursors
    clock: Callable[[], datetime]
    """The current UTC moment."""
    draw: Callable[[], int]
    """A random number in [0, 10000) for the split."""
    under_way: UnderWay = field(default_factory=UnderWay)

    def store_metrics(self) -> None:
        """Write what the recorder holds; on a failure it is kept for the next time."""

        def store(windows: Mapping[WindowKey, Window]) -> None:
            with self.database.write() as connection:
                metric_windows.store(connection, windows)

        self.recorder.hand_over(store)


@dataclass
class Context:
    """One request of an authenticated client."""

    parts: Parts
    client_id: str
    request_id: str
    if_match: str | None = None
    routing_key: str | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """More headers for the answer."""
    _transaction: sa.Connection | None = None
    _opened: Generator[sa.Connection] | None = None

    @property
    def now(self) -> datetime:
        """The service's clock."""
        return self.parts.clock()

    @contextmanager
    def read(self) -> Generator[sa.Connection]:
        """A view for reading; inside a write transaction it is that transaction's view."""
        if self._transaction is not None:
            yield self._transaction
            return
        with self.parts.database.read() as connection:
            yield connection

    @property
    def transaction(self) -> sa.Connection:
        """The request's one write transaction, opened at the first use: long work comes before it.

        Committed by the request boundary together with the idempotency row, or rolled back with any exception.
        """
        if self._transaction is None:
            self._opened = self._open()
            self._transaction = next(self._opened)
        return self._transaction

    def _open(self) -> Generator[sa.Connection]:
        with self.parts.database.write() as connection:
            yield connection

    def commit(self) -> bool:
        """Make the changes durable; answers whether there were any. Called by the boundary, before the answer."""
        if self._opened is None:
            return False
        next(self._opened, None)
        self._opened = self._transaction = None
        return True

    def roll_back(self, reason: BaseException) -> None:
        """Undo everything."""
        if self._opened is None:
            return
        try:
            self._opened.throw(reason)
        except BaseException as raised:
            if raised is not reason:
                raise
        finally:
            self._opened = self._transaction = None
