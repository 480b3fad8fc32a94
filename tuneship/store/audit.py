"""The audit chain: who did what to which resource, with what outcome. Rows are only ever added.

Each row is sealed over the one before: `mac_n = HMAC-SHA-256(key, mac_(n-1) || row_n)`, with a key that lies outside
the database. A row that was changed, put in or taken out breaks the chain from there on. Last rows that were taken out
do not: heads that are signed and kept elsewhere show those (`audit_heads.py`). One writer works at a time
(`database.py`), so the chain is one line on both databases. Rows hold ids, words of the service and counts; no text.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from tuneship.store.queries import Row
from tuneship.store.tables import audit

# What the first row is sealed over.
BEGINNING = bytes(32)
ROWS_AT_ONCE = 5_000
# The client of a row that belongs to no tenant: only who runs the service reads it.
NOBODY = ""


@dataclass(frozen=True)
class AuditRecord:
    """One answer of the service, before it is given."""

    at: datetime
    client_id: str
    key_id: str
    """The public part of the API key."""
    action: str
    """The operation, e.g. `create_job`."""
    resource_id: str | None
    status: int
    """Of the answer."""
    address: str
    """Where the request came from."""
    request_id: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Fault:
    """Where the chain is not what was written: `seq` is the first row concerned."""

    seq: int
    reason: str


class Chain:
    """Adds and verifies rows under one key."""

    def __init__(self, key: bytes) -> None:
        """`key` lies outside the database."""
        self._key = key

    def add(self, connection: sa.Connection, entry: AuditRecord) -> None:
        """In the transaction of the change, or in one that commits before the answer."""
        seq, mac = head_of(connection)
        row = {"seq": seq + 1, **asdict(entry)}
        connection.execute(sa.insert(audit).values(**row, mac=self._seal(mac, row)))

    def fault(self, rows: Iterator[Row]) -> Fault | None:
        """The first row, of all in order, that does not follow from the one before."""
        mac, due = BEGINNING, 1
        for row in rows:
            if row["seq"] != due:
                return Fault(due, "rows are missing")
            mac = self._seal(mac, row)
            if not hmac.compare_digest(mac, row["mac"]):
                return Fault(due, "the row was changed, or one before it was")
            due += 1
        return None

    def _seal(self, before: bytes, row: Mapping[str, Any]) -> bytes:
        return hmac.digest(self._key, before + _canonical(row), hashlib.sha256)


def _canonical(row: Mapping[str, Any]) -> bytes:
    """The same bytes for a row as it is written and as it is read back, on both databases."""
    moment: datetime = row["at"]
    values = [row[field.name] for field in fields(AuditRecord)[1:]]
    at = moment.astimezone(UTC).isoformat(timespec="microseconds")
    return json.dumps([row["seq"], at, *values], separators=(",", ":")).encode()


def rows_of(
    connection: sa.Connection, *, after: int = 0, client_id: str | None = None
) -> Iterator[Row]:
    """Rows behind a position, in order, of one tenant or of all; read piece by piece."""
    while found := page_of(connection, client_id, after=after, limit=ROWS_AT_ONCE):
        yield from found
        after = found[-1]["seq"]


def page_of(
    connection: sa.Connection, client_id: str | None, *, after: int, limit: int
) -> Sequence[Row]:
    """The next rows of a tenant (`None`: of all), oldest first."""
    query = sa.select(audit).where(audit.c.seq > after).order_by(audit.c.seq).limit(limit)
    if client_id is not None:
        query = query.where(audit.c.client_id == client_id)
    return [dict(row) for row in connection.execute(query).mappings()]


def head_of(connection: sa.Connection) -> tuple[int, bytes]:
    """Number and seal of the last row; 0 for an empty chain."""
    query = sa.select(audit.c.seq, audit.c.mac).order_by(audit.c.seq.desc()).limit(1)
    last = connection.execute(query).first()
    return (0, BEGINNING) if last is None else (last.seq, last.mac)


def rows_at(connection: sa.Connection, numbers: Sequence[int]) -> Sequence[Row]:
    """Certain rows."""
    found: list[Row] = []
    for start in range(0, len(numbers), ROWS_AT_ONCE):
        query = sa.select(audit).where(audit.c.seq.in_(numbers[start : start + ROWS_AT_ONCE]))
        found += [dict(row) for row in connection.execute(query).mappings()]
    return found
