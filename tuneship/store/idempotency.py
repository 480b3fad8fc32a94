"""`Idempotency-Key`: one key makes at most one resource. The answer's row is in the resource's own transaction."""

from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa

from tuneship.contract.errors import InvalidRequestError, ValidationRefused
from tuneship.store.tables import idempotency

LOCK = timedelta(seconds=60)
KEPT = timedelta(hours=24)


@dataclass(frozen=True)
class StoredAnswer:
    """What the first request was answered; the body is sealed, since it may show a secret that is shown once."""

    status: int
    location: str | None
    body: bytes


@dataclass(frozen=True)
class Key:
    """A tenant's key and what was asked with it."""

    client_id: str
    key: str
    fingerprint: str

    @property
    def about(self) -> str:
        """What the stored answer is sealed for."""
        return f"{self.client_id}\n{self.key}"


@dataclass(frozen=True)
class Hold:
    """The right to work on a key until the lock ends; a later holder has another `lease_until`."""

    key: Key
    lease_until: datetime


def _row(key: Key) -> sa.ColumnElement[bool]:
    return (idempotency.c.client_id == key.client_id) & (idempotency.c.key == key.key)


def _held(hold: Hold) -> sa.ColumnElement[bool]:
    return (
        _row(hold.key)
        & (idempotency.c.lease_until == hold.lease_until)
        & idempotency.c.body.is_(None)
    )


def begin(connection: sa.Connection, key: Key, now: datetime) -> StoredAnswer | Hold:
    """Take the key, or answer what it already made.

    Raises `ValidationRefused` when it was used for another request, `InvalidRequestError` (409, worth a retry) while
    the first request is still being worked on.
    """
    kept = _row(key) & (idempotency.c.created_at >= now - KEPT)
    found = connection.execute(sa.select(idempotency).where(kept)).mappings().first()
    if found is not None and found["fingerprint"] != key.fingerprint:
        raise ValidationRefused("Idempotency-Key was used for another request")
    if found is not None and found["body"] is not None:
        return StoredAnswer(found["status"], found["location"], found["body"])
    if found is not None and found["lease_until"] > now:
        raise _busy()
    connection.execute(sa.delete(idempotency).where(_row(key)))
    connection.execute(
        sa.insert(idempotency).values(
            client_id=key.client_id,
            key=key.key,
            fingerprint=key.fingerprint,
            created_at=now,
            lease_until=now + LOCK,
        )
    )
    return Hold(key, now + LOCK)


def _busy() -> InvalidRequestError:
    busy = InvalidRequestError(
        "a request with this Idempotency-Key is still being worked on", status=409
    )
    busy.retryable = True
    return busy


def finish(connection: sa.Connection, hold: Hold, answer: StoredAnswer) -> None:
    """Store the answer; call it in the transaction that makes the resource.

    Raises 409 when the lock ended and another request took the key: of two slow ones only one may make anything.
    """
    result = connection.execute(
        sa.update(idempotency)
        .where(_held(hold))
        .values(status=answer.status, location=answer.location, body=answer.body)
    )
    if result.rowcount != 1:
        raise _busy()


def abandon(connection: sa.Connection, hold: Hold) -> None:
    """Give the key back after a refusal: refusals are not stored."""
    connection.execute(sa.delete(idempotency).where(_held(hold)))


def forget(connection: sa.Connection, now: datetime) -> None:
    """Drop what is kept no longer."""
    connection.execute(sa.delete(idempotency).where(idempotency.c.created_at < now - KEPT))


def release_all(connection: sa.Connection) -> None:
    """At the start of the only service on this database: no request can still be running."""
    connection.execute(sa.delete(idempotency).where(idempotency.c.body.is_(None)))
