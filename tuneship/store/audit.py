"""The audit trail as an append-only chain of rows: who did what to which resource, with what outcome.

Each row is sealed over the row before: `mac_n = HMAC-SHA-256(key, mac_(n-1) || row_n)`, with a key that lies outside
the database. A row that was changed, inserted or deleted breaks the chain from there on. Rows deleted from its end do
not; signed heads that are kept elsewhere reveal those (`audit_heads.py`). There is one writer at a time
(`database.py`), so the chain never forks. Rows hold ids, codes of the service and counts, never free text.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from tuneship.store.queries import fetch_all
from tuneship.store.row_types import AuditRow
from tuneship.store.tables import audit

# The seal "before" the first row.
BEGINNING = bytes(32)
ROWS_PER_QUERY = 5_000
# The client of rows that belong to no tenant: only the operator reads them.
NOBODY = ""


@dataclass(frozen=True)
class AuditRecord:
    """One request and the answer that the service is about to give."""

    at: datetime
    client_id: str
    key_id: str
    """The public part of the API key."""
    action: str
    """The operation, e.g. `create_job`."""
    resource_id: str | None
    status: int
    """HTTP status of the answer."""
    address: str
    """Network address of the caller."""
    request_id: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Fault:
    """The first place at which the chain is not as it was written; `seq` is the number of the row."""

    seq: int
    reason: str


class Chain:
    """Appends rows to the chain and verifies it, under one key."""

    def __init__(self, key: bytes) -> None:
        """Use `key`, a secret that lies outside the database."""
        self._key = key

    def add(self, connection: sa.Connection, entry: AuditRecord) -> None:
        """Append a row: in the transaction of the change, or in one that commits before the answer is sent."""
        seq, mac = head_of(connection)
        row = {"seq": seq + 1, **asdict(entry)}
        connection.execute(sa.insert(audit).values(**row, mac=self._seal(mac, row)))

    def fault(self, rows: Iterator[AuditRow]) -> Fault | None:
        """Verify the whole chain; `rows` are all of its rows in order. None: it is as it was written."""
        mac, expected_seq = BEGINNING, 1
        for row in rows:
            if row["seq"] != expected_seq:
                return Fault(expected_seq, "rows are missing")
            mac = self._seal(mac, row)
            if not hmac.compare_digest(mac, row["mac"]):
                return Fault(expected_seq, "the row was changed, or one before it was")
            expected_seq += 1
        return None

    def _seal(self, before: bytes, row: Mapping[str, Any]) -> bytes:
        # The encoding must be the same for a row that is written and one that was read, on both databases:
        # UTC, microseconds, and the columns in the order of `AuditRecord`.
        moment: datetime = row["at"]
        at = moment.astimezone(UTC).isoformat(timespec="microseconds")
        values = [row[field.name] for field in fields(AuditRecord)[1:]]
        encoded = json.dumps([row["seq"], at, *values], separators=(",", ":")).encode()
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
