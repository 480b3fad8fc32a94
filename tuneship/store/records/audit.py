"""The audit trail as an append-only chain of rows: who did what to which resource, with what outcome.

Each row is sealed over the row before: `mac_n = HMAC-SHA-256(key, mac_(n-1) || row_n)`, with a key that lies outside
the database. A row that was changed, inserted or deleted breaks the chain from there on. Rows deleted from its end do
not; signed heads that are kept elsewhere reveal those (`audit_heads.py`). Rows hold ids, codes of the service, counts
and the names of people who signed in, and no other text.

On SQLite a row joins the chain in the transaction that writes it. On Postgres the writers of several tenants are at
work at once, and a chain that each of them extended would make them wait for each other. There a row first lies in
`unlinked_audit`, sealed by itself, and `link` moves it into the chain a moment after its commit. SQLite keeps the first
way, since its writers wait for each other in any case, and a row that is in the chain at its commit is better still.
"""

import hashlib
import hmac
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from tuneship.store.database.database import CHAIN_LOCK, Database
from tuneship.store.database.rows import fetch_all
from tuneship.store.database.tables import (
    AuditRow,
    SealedAuditRow,
    UnlinkedAuditRow,
    audit,
    unlinked_audit,
)

logger = logging.getLogger(__name__)

# The seal "before" the first row, and before each row that is not linked yet.
BEGINNING = bytes(32)
# The number of a row that is not linked yet; those in the chain begin with 1.
UNLINKED = 0
ROWS_PER_QUERY = 5_000
# Rows that one transaction links.
LINKED_AT_ONCE = 1_000
# The client of rows that belong to no tenant: only the operator reads them.
NOBODY = ""


@dataclass(frozen=True)
class Person:
    """Somebody who signed in by OpenID Connect: the issuer and its id of the person, and the name that it gave."""

    issuer: str
    subject: str
    name: str


@dataclass(frozen=True)
class AuditRecord:
    """One request and the answer that the service is about to give."""

    at: datetime
    client_id: str
    # The public part of the API key.
    key_id: str
    # The operation, e.g. `create_job`.
    action: str
    resource_id: str | None
    # HTTP status of the answer.
    status: int
    # Network address of the caller.
    address: str
    request_id: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    # None where a key was used. Last, since it is sealed only where there is one.
    person: Person | None = None


@dataclass(frozen=True)
class UnlinkedRows:
    """A count of the rows that are not linked into the chain yet."""

    number: int
    # When the first of them was written; None without one.
    oldest: datetime | None
    # How many of them were not written by this service.
    forged: int


@dataclass(frozen=True)
class Fault:
    """The first row where the chain differs from what was written; `seq` is its number."""

    seq: int
    reason: str


# The columns over which a row is sealed, in this order.
NAMES = tuple(field.name for field in fields(AuditRecord))


class Chain:
    """Appends rows to the chain and verifies it, under one key."""

    def __init__(self, key: bytes) -> None:
        """Use `key`, a secret that lies outside the database."""
        self._key = key

    def add(self, connection: sa.Connection, entry: AuditRecord) -> None:
        """Add a row: in the transaction of the change, or in one that commits before the answer is sent."""
        row = asdict(entry)
        if connection.dialect.name == "sqlite":
            self._append(connection, [row])
        else:
            mac = self._seal(BEGINNING, UNLINKED, row)
            connection.execute(sa.insert(unlinked_audit).values(**row, mac=mac))

    def _append(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Put rows at the end of the chain. Nobody else may do so before the transaction ends."""
        seq, mac = head_of(connection)
        linked: list[dict[str, Any]] = []
        for row in rows:
            seq += 1
            mac = self._seal(mac, seq, row)
            linked.append({**{name: row[name] for name in NAMES}, "seq": seq, "mac": mac})
        if linked:
            connection.execute(sa.insert(audit), linked)

    def link_all(self, database: Database) -> None:
        """Move every committed row into the chain. Any member of a cluster may do so, while others do, too.

        A row that this service did not write stays where it is; `unlinked` counts it. Raises SQLAlchemy's errors.
        """
        with database.read() as connection:
            last = connection.scalar(sa.select(sa.func.max(unlinked_audit.c.position))) or 0
        position = 0
        while position < last:
            with database.write_beside() as connection:
                position = self._link(connection, position) or last

    def _link(self, connection: sa.Connection, after: int) -> int | None:
        """Move the next rows after a position into the chain; returns the last position, None without any row."""
        if connection.dialect.name == "postgresql":
            # The chain is read in later statements, which see what the holder before this one has committed.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(CHAIN_LOCK)))
        table = unlinked_audit
        query = sa.select(table).where(table.c.position > after).order_by(table.c.position)
        found: list[UnlinkedAuditRow] = fetch_all(connection, query.limit(LINKED_AT_ONCE))
        genuine = [row for row in found if self._is_genuine(row)]
        if len(genuine) < len(found):
            text = "rows that wait for the audit chain, and were not written by this service: %d"
            logger.error(text, len(found) - len(genuine))
        self._append(connection, genuine)
        positions = [row["position"] for row in genuine]
        connection.execute(sa.delete(table).where(table.c.position.in_(positions)))
        return found[-1]["position"] if found else None

    def unlinked(self, connection: sa.Connection) -> UnlinkedRows:
        """Count and verify the rows that are not linked yet."""
        rows: list[UnlinkedAuditRow] = fetch_all(connection, sa.select(unlinked_audit))
        oldest = min((row["at"] for row in rows), default=None)
        return UnlinkedRows(len(rows), oldest, sum(not self._is_genuine(row) for row in rows))

    def _is_genuine(self, row: SealedAuditRow) -> bool:
        return hmac.compare_digest(self._seal(BEGINNING, UNLINKED, row), row["mac"])

    def fault(self, rows: Iterator[AuditRow]) -> Fault | None:
        """Verify the whole chain; `rows` are all of its rows in order. None: it is as it was written."""
        mac, expected_seq = BEGINNING, 1
        for row in rows:
            if row["seq"] != expected_seq:
                return Fault(expected_seq, "rows are missing")
            mac = self._seal(mac, row["seq"], row)
            if not hmac.compare_digest(mac, row["mac"]):
                return Fault(expected_seq, "the row was changed, or one before it was")
            expected_seq += 1
        return None

    def _seal(self, before: bytes, seq: int, row: Mapping[str, Any]) -> bytes:
        # The encoding must be the same for a row that is written and one that was read, on both databases:
        # UTC, microseconds, and the columns in the order of `AuditRecord`.
        moment: datetime = row["at"]
        at = moment.astimezone(UTC).isoformat(timespec="microseconds")
        values = [row[name] for name in NAMES[1:] if name != "person" or row[name] is not None]
        text = json.dumps([seq, at, *values], separators=(",", ":"), sort_keys=True)
        encoded = text.encode()
        return hmac.digest(self._key, before + encoded, hashlib.sha256)


def rows_of(
    connection: sa.Connection, *, after: int = 0, client_id: str | None = None
) -> Iterator[AuditRow]:
    """Iterate over the rows after `after`, in order, of one tenant or of all; reads them in pages."""
    while rows := page_of(connection, client_id, after=after, limit=ROWS_PER_QUERY):
        yield from rows
        after = rows[-1]["seq"]


def page_of(
    connection: sa.Connection, client_id: str | None, *, after: int, limit: int
) -> Sequence[AuditRow]:
    """The next `limit` rows of a tenant (None: of all tenants), oldest first."""
    query = sa.select(audit).where(audit.c.seq > after).order_by(audit.c.seq).limit(limit)
    if client_id is not None:
        query = query.where(audit.c.client_id == client_id)
    return fetch_all(connection, query)


def newest_of(
    connection: sa.Connection, client_id: str, *, before: int, limit: int
) -> Sequence[AuditRow]:
    """The `limit` rows of a tenant before a number (0: the last ones), newest first."""
    query = sa.select(audit).where(audit.c.client_id == client_id)
    if before:
        query = query.where(audit.c.seq < before)
    return fetch_all(connection, query.order_by(audit.c.seq.desc()).limit(limit))


def head_of(connection: sa.Connection) -> tuple[int, bytes]:
    """Number and seal of the last row; number 0 for an empty chain."""
    query = sa.select(audit.c.seq, audit.c.mac).order_by(audit.c.seq.desc()).limit(1)
    last = connection.execute(query).first()
    return (0, BEGINNING) if last is None else (last.seq, last.mac)


def rows_at(connection: sa.Connection, numbers: Sequence[int]) -> Sequence[AuditRow]:
    """The rows with these numbers, as far as they exist."""
    rows: list[AuditRow] = []
    for start in range(0, len(numbers), ROWS_PER_QUERY):
        chosen = numbers[start : start + ROWS_PER_QUERY]
        rows += fetch_all(connection, sa.select(audit).where(audit.c.seq.in_(chosen)))
    return rows
