"""The context of a request: the service's parts, the caller, and one transaction that `operation_calls.py` commits."""

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa

from tuneship.contract.errors import InvalidRequestError, PermissionDenied
from tuneship.service.access.audit_facts import AuditFacts
from tuneship.service.access.hipaa import Caller, is_hipaa, refuse_use
from tuneship.service.context.parts import Parts
from tuneship.service.context.staged_bytes import StagedCount
from tuneship.service.telemetry.tracing import SpanNotes
from tuneship.settings import ApiProfile
from tuneship.store.database import rows, tables
from tuneship.store.database.rows import Row
from tuneship.store.records import job_records
from tuneship.store.records.audit import AuditRecord

logger = logging.getLogger(__name__)

# The most entries of a list without pages: nobody's answer may grow without a bound.
WHOLE_LIST = 1_000


@dataclass
class Context:
    """One request of an authenticated client."""

    parts: Parts
    client_id: str
    request_id: str
    if_match: str | None = None
    routing_key: str | None = None
    # The API profile that decides on the fields of the answer.
    profile: ApiProfile = "auto"
    # The profile's lists have no pages, and the caller did not request one.
    wants_whole_lists: bool = False
    last_event_id: str | None = None
    # Nobody waits for the answer: it is a request of a batch, which gives way to all others.
    is_background: bool = False
    # The model that answers a request of OpenAI's API, once it is known.
    model: str | None = None
    # The scopes of the caller's key.
    scopes: frozenset[str] = frozenset()
    # The media types that the caller accepts, as they were sent.
    accept: str = ""
    # The caller's key was revoked or has expired while the request was at work.
    key_has_ended: bool = False
    caller: Caller = field(default_factory=Caller)
    # The facts for this request's audit entry.
    audit_facts: AuditFacts = field(default_factory=AuditFacts)
    # The notes for this request's span.
    span: SpanNotes = field(default_factory=SpanNotes)
    # More headers for the answer.
    headers: dict[str, str] = field(default_factory=dict[str, str])
    # Actions after the commit, e.g. removing files. A start of the service does what a killed one has left undone.
    after_commit: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    # Actions that undo work outside the database, e.g. remove a stored file, after a transaction without commit.
    #
    # A commit that failed may have succeeded, so an action must check the rows before it removes anything.
    after_rollback: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    # The bytes of the file that is staged for the request (`quotas.staging`).
    staged: StagedCount = field(default_factory=StagedCount)
    # Set when the caller of an operation with threads of its own has disconnected, so that nobody waits for it.
    left: threading.Event = field(default_factory=threading.Event)
    _transaction: sa.Connection | None = None
    # Ends the transaction.
    _opened: ExitStack | None = None

    @property
    def now(self) -> datetime:
        """The present time by the service's clock."""
        return self.parts.clock()

    @contextmanager
    def read(self) -> Generator[sa.Connection]:
        """A connection for reading; inside a write transaction it is that transaction's."""
        if self._transaction is not None:
            yield self._transaction
            return
        with self.parts.database.read() as connection:
            yield connection

    def require(self, scope: str, why: str = "") -> None:
        """Raises `PermissionDenied` if the key lacks a scope that the request needs beyond its operation's own."""
        if scope not in self.scopes:
            raise PermissionDenied(f"{why}this key lacks the scope {scope}")

    def page_size(self, limit: int) -> int:
        """The entries on one page of a list: `limit`, or many if the caller could not see that there are more."""
        return WHOLE_LIST if self.wants_whole_lists else limit

    def touch(self, *resources: Row) -> None:
        """Note that a handler looked at these jobs, deployments, batches or files of batches.

        A row may require an audit entry, or refuse this caller. Raises 400 or 403.
        """
        for row in resources:
            self.audit_facts.touch(row)
            if is_hipaa(row):
                refuse_use(self.caller)

    def touch_models(self, connection: sa.Connection, names: Iterable[str]) -> None:
        """Note that a handler looked at deployments of models: a job's `audit_logging` holds for its model too."""
        for job in job_records.security_settings_of(connection, self.client_id, names):
            self.audit_facts.touch(job)

    def touch_by_id(self, connection: sa.Connection, identifier: str) -> None:
        """Note that a replayed answer is about the resource with this id."""
        secured = [table for table in tables.RESOURCES if "security_settings" in table.c]
        for table in secured:
            row = rows.fetch(connection, table, identifier, client_id=self.client_id)
            if row is not None:
                self.touch_models(connection, [row.get("model_name") or ""])
                self.touch(row)

    def refuse_stale(self, etag: str, message: str) -> None:
        """Raises 412 if `If-Match` names a state other than the current `etag`."""
        accepted = {tag.strip() for tag in (self.if_match or "*").split(",")}
        if not accepted & {"*", etag}:
            raise InvalidRequestError(message, status=412)

    @property
    def transaction(self) -> sa.Connection:
        """The request's one write transaction, opened at the first use: do long work before it.

        `operation_calls.py` commits it together with the idempotency row, or rolls it back with any exception.
        """
        if self._transaction is None:
            opened = ExitStack()
            self._transaction = opened.enter_context(self.parts.database.write(self.client_id))
            self._opened = opened
        return self._transaction

    def add_audit_entry(self, connection: sa.Connection, status: int) -> None:
        """Add this request's entry to the audit chain. Called before the answer."""
        facts = self.audit_facts
        self.parts.audit.add(
            connection,
            AuditRecord(
                at=self.now,
                client_id=self.client_id,
                key_id=facts.key_id,
                action=facts.action,
                resource_id=facts.resource_of(status),
                status=status,
                address=facts.address,
                request_id=self.request_id,
                prompt_tokens=facts.prompt_tokens,
                completion_tokens=facts.completion_tokens,
                person=facts.person,
            ),
        )

    def commit_audit_entry(self, status: int) -> None:
        """Add this request's entry in a transaction of its own, for a request without a change."""
        with self.parts.database.write_beside() as connection:
            self.add_audit_entry(connection, status)

    def commit(self) -> None:
        """Make the changes durable, if there are any. Called before the answer."""
        if self._opened is None:
            return
        self._opened.close()
        self._opened = self._transaction = None
        self._run(self.after_commit)

    def _run(self, actions: Sequence[Callable[[], None]]) -> None:
        for action in actions:
            try:
                action()
            except Exception:  # the transaction has ended, and the answer must report its result
                logger.exception("%s: an action after the transaction failed", self.request_id)

    def roll_back(self, reason: BaseException) -> None:
        """Undo the changes, then the work outside the database."""
        opened, self._opened, self._transaction = self._opened, None, None
        try:
            if opened is not None:
                # After a commit that failed the stack is empty, and this does nothing.
                opened.__exit__(type(reason), reason, reason.__traceback__)
        finally:
            self._run(self.after_rollback)


# Makes the context of a request from all but the parts of the service.
NewContext = Callable[..., Context]
