"""What a handler is given: the service's parts, who asks, and one transaction that the request boundary commits."""

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa

from tuneship.contract.errors import InvalidRequestError
from tuneship.events.connector import Receivers
from tuneship.metrics.recorder import Recorder, WindowKey
from tuneship.metrics.windows import MetricWindow
from tuneship.runtime.replica_set import ReplicaPool
from tuneship.security.vault import Vault
from tuneship.service.access.audit_trail import AuditTrail
from tuneship.service.access.data_keys import Keyring
from tuneship.service.access.hipaa import Caller, is_hipaa, refuse_use
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.catalogues.instance_types import InstanceCatalogue
from tuneship.service.common.clock_watch import ClockWatch
from tuneship.service.common.cursors import Cursors
from tuneship.service.common.drain import Drain
from tuneship.service.common.fair_threads import RequestThreads
from tuneship.service.common.fault_injection import PromptLengths
from tuneship.service.common.in_flight import InFlightGenerations
from tuneship.service.common.log_recorder import LogRecorder
from tuneship.service.common.streaming import Notifier
from tuneship.settings import ApiProfile, ServiceSettings
from tuneship.store import deployment_logs, job_records, metric_windows, tables
from tuneship.store import queries as rows
from tuneship.store.audit import AuditRecord, Chain
from tuneship.store.blobs import Blobs
from tuneship.store.database import Database
from tuneship.store.queries import Row

logger = logging.getLogger(__name__)

# More than any tenant has of anything.
MOST_ROWS = 2**31 - 1


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
    receivers: Receivers
    """Which webhook receivers may be called."""
    vault: Vault
    keyring: Keyring
    audit: Chain
    clock: Callable[[], datetime]
    """The current UTC moment."""
    isolates: bool
    """Whether worker processes have no network on this host."""
    draw: Callable[[], int]
    """A random number in [0, 10000) for the split."""
    clock_watch: ClockWatch = field(default_factory=ClockWatch)
    instances: InstanceCatalogue = field(default_factory=InstanceCatalogue)
    in_flight: InFlightGenerations = field(default_factory=InFlightGenerations)
    prompt_lengths: PromptLengths = field(default_factory=PromptLengths)
    deployment_log: LogRecorder = field(default_factory=LogRecorder)
    notifier: Notifier = field(default_factory=Notifier)
    drain: Drain = field(default_factory=Drain)
    threads: RequestThreads = field(default_factory=RequestThreads)
    halted: threading.Event = field(default_factory=threading.Event)
    """Set when the service ends: the reading of a big file stops, wherever it runs."""

    def store_metrics(self) -> None:
        """Write what the recorder holds; on a failure it is kept for the next time."""

        def store(windows: Mapping[WindowKey, MetricWindow]) -> None:
            with self.database.write(clears=False) as connection:
                metric_windows.store(connection, windows, self.clock().timestamp())

        self.recorder.hand_over(store)

    def store_logs(self) -> None:
        """Write the lines of deployments' logs that wait; on a failure they are kept for the next time."""

        def store(entries: Sequence[deployment_logs.LogEntry]) -> None:
            with self.database.write(clears=False) as connection:
                deployment_logs.add(connection, *entries)

        self.deployment_log.hand_over(store, self.clock())


@dataclass
class Context:
    """One request of an authenticated client."""

    parts: Parts
    client_id: str
    request_id: str
    if_match: str | None = None
    routing_key: str | None = None
    profile: ApiProfile = "auto"
    """Which reference's fields the answer shall have."""
    wants_whole_lists: bool = False
    """The profile's lists have no pages, and the caller did not ask for one."""
    last_event_id: str | None = None
    caller: Caller = field(default_factory=Caller)
    trail: AuditTrail = field(default_factory=AuditTrail)
    """What the audit chain will say of this request."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """More headers for the answer."""
    after_commit: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """What follows the commit and must not precede it, e.g. removing files; a start of the service makes up for it."""
    after_rollback: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """What undoes work outside the database, e.g. a stored file, when the transaction has ended without a commit.

    Of a commit that failed nobody knows whether it is in force: an action has to look before it takes something away.
    """
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

    def page_size(self, limit: int) -> int:
        """How many entries a list shows: `limit`, or all where the caller could not see that there are more."""
        return MOST_ROWS if self.wants_whole_lists else limit

    def touch(self, row: Row) -> None:
        """A handler looked at this job or deployment; it may ask for an audit row, or refuse this caller (400, 403)."""
        self.trail.touch(row)
        if is_hipaa(row):
            refuse_use(self.caller)

    def touch_models(self, connection: sa.Connection, names: Iterable[str]) -> None:
        """A handler looked at deployments of these models: `audit_logging` of a job holds for its model, too."""
        for job in job_records.safeguards_behind(connection, self.client_id, names):
            self.trail.touch(job)

    def touch_by_id(self, connection: sa.Connection, identifier: str) -> None:
        """The same for an answer from memory, by the id that it is about."""
        for table in (tables.jobs, tables.deployments):
            row = rows.fetch(connection, table, identifier, client_id=self.client_id)
            if row is not None:
                self.touch_models(connection, [row.get("model_name", "")])
                self.touch(row)

    def refuse_stale(self, etag: str, message: str) -> None:
        """`If-Match` names the state that the caller has seen, `etag` is the present one. Raises 412."""
        wanted = {one.strip() for one in (self.if_match or "*").split(",")}
        if not wanted & {"*", etag}:
            raise InvalidRequestError(message, status=412)

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

    def add_audit_entry(self, connection: sa.Connection, status: int) -> None:
        """Add this request's row to the audit chain. Called by the boundary, before the answer."""
        trail = self.trail
        self.parts.audit.add(
            connection,
            AuditRecord(
                at=self.now,
                client_id=self.client_id,
                key_id=trail.key_id,
                action=trail.action,
                resource_id=trail.resource_of(status),
                status=status,
                address=trail.address,
                request_id=self.request_id,
                prompt_tokens=trail.prompt_tokens,
                completion_tokens=trail.completion_tokens,
            ),
        )

    def commit_audit_entry(self, status: int) -> None:
        """The same in a transaction of its own: no change belongs to it."""
        with self.parts.database.write() as connection:
            self.add_audit_entry(connection, status)

    def commit(self) -> bool:
        """Make the changes durable; answers whether there were any. Called by the boundary, before the answer."""
        if self._opened is None:
            return False
        next(self._opened, None)
        self._opened = self._transaction = None
        self._run(self.after_commit)  # what was committed stands, and the answer must say so
        return True

    def _run(self, actions: Sequence[Callable[[], None]]) -> None:
        for action in actions:
            try:
                action()
            except Exception:
                logger.exception("%s: what follows the transaction failed", self.request_id)

    def roll_back(self, reason: BaseException) -> None:
        """Undo everything."""
        try:
            self._end_transaction(reason)
        finally:
            self._run(self.after_rollback)

    def _end_transaction(self, reason: BaseException) -> None:
        if self._opened is None:
            return
        try:
            self._opened.throw(reason)
        except BaseException as raised:
            if raised is not reason:
                raise
        finally:
            self._opened = self._transaction = None
