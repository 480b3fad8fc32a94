"""Stores answers by `Idempotency-Key`, in the transaction of the resource: one key makes at most one resource."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

import sqlalchemy as sa

from tuneship.contract.errors import InvalidRequestError, ValidationFailed
from tuneship.store.cluster import member_sessions
from tuneship.store.cluster.member_sessions import ALONE
from tuneship.store.database.tables import IdempotencyRow, idempotency

# How long a request may work on a key before a repeated request takes it over. One whose member is gone has no time.
LOCK = timedelta(seconds=60)
# How long the tries of one request, which a client only numbers, may lie apart.
TRIES_WITHIN = timedelta(minutes=10)
# How long an answer is kept.
KEPT = timedelta(hours=24)


@dataclass(frozen=True)
class StoredAnswer:
    """The answer to the first request with a key; its body is sealed, since it may hold a secret shown only once."""

    status: int
    location: str | None
    body: bytes


@dataclass(frozen=True)
class Key:
    """A tenant's idempotency key and the fingerprint of the request that came with it."""

    client_id: str
    key: str
    fingerprint: str
    # How often the request was sent before, where a client numbers its tries instead of choosing keys.
    retry: int | None = None

    @property
    def about(self) -> str:
        """The context to which the seal of the stored answer is bound."""
        return f"{self.client_id}\n{self.key}"


@dataclass(frozen=True)
class Hold:
    """The right of a member to work on a key until `lease_until`; both distinguish this holder from later ones."""

    key: Key
    lease_until: datetime
    member: int


def _row(key: Key) -> sa.ColumnElement[bool]:
    return (idempotency.c.client_id == key.client_id) & (idempotency.c.key == key.key)


def _held(hold: Hold) -> sa.ColumnElement[bool]:
    return (
        _row(hold.key)
        & (idempotency.c.lease_until == hold.lease_until)
        & (idempotency.c.member == hold.member)
        & idempotency.c.body.is_(None)
    )


def is_known(connection: sa.Connection, client_id: str, key: str) -> bool:
    """Whether a request with this key has begun, and may be answered already."""
    query = sa.select(idempotency.c.key).where(
        (idempotency.c.client_id == client_id) & (idempotency.c.key == key)
    )
    return connection.execute(query).first() is not None


def begin(
    connection: sa.Connection, key: Key, now: datetime, member: int = ALONE
) -> StoredAnswer | Hold:
    """Lock the key for a member of a cluster, or for a single service, or return its stored answer.

    Raises `ValidationFailed` if the key was used for another request, and `InvalidRequestError` (409, retryable) while
    the first request is still in flight.
    """
    is_kept = idempotency.c.created_at >= now - KEPT
    query = sa.select(idempotency).where(_row(key), is_kept)
    row = cast("IdempotencyRow | None", connection.execute(query).mappings().first())
    if row is not None:
        if row["fingerprint"] != key.fingerprint:
            raise ValidationFailed("Idempotency-Key was used for another request")
        if row["body"] is not None and row["status"] is not None:
            return StoredAnswer(row["status"], row["location"], row["body"])
        # Whether a service alone is gone, nobody knows.
        holder = row["member"]
        if row["lease_until"] > now and (
            holder == ALONE or not member_sessions.is_gone(connection, holder)
        ):
            raise _busy()

    # No row, an expired one, or the lock of a request that took too long, or whose member is gone.
    connection.execute(sa.delete(idempotency).where(_row(key)))
    connection.execute(
        sa.insert(idempotency).values(
            client_id=key.client_id,
            key=key.key,
            fingerprint=key.fingerprint,
            created_at=now,
            lease_until=now + LOCK,
            member=member,
        )
    )
    return Hold(key, now + LOCK, member)


def begin_try(
    connection: sa.Connection, key: Key, now: datetime, member: int = ALONE
) -> StoredAnswer | Hold | None:
    """As `begin` for a numbered try: the first one of a request begins it again.

    None: a request that looks the same is still being worked on, and this one is not its repetition.
    """
    is_over = _row(key) & idempotency.c.body.is_not(None)
    if key.retry:
        is_over &= idempotency.c.created_at < now - TRIES_WITHIN
    connection.execute(sa.delete(idempotency).where(is_over))
    try:
        return begin(connection, key, now, member)
    except InvalidRequestError:
        if key.retry:
            raise
        return None


def _busy() -> InvalidRequestError:
    busy = InvalidRequestError(
        "a request with this Idempotency-Key is still being worked on", status=409
    )
    busy.retryable = True
    return busy


def finish(connection: sa.Connection, hold: Hold, answer: StoredAnswer) -> None:
    """Store the answer; call it in the transaction that makes the resource.

    Raises `InvalidRequestError` (409) if another request took the key, since the lock expired or this member seemed to
    be gone: only one of the two may make a resource.
    """
    result = connection.execute(
        sa.update(idempotency)
        .where(_held(hold))
        .values(status=answer.status, location=answer.location, body=answer.body)
    )
    if result.rowcount != 1:
        raise _busy()


def abandon(connection: sa.Connection, hold: Hold) -> None:
    """Release the key after a refusal, which is not stored."""
    connection.execute(sa.delete(idempotency).where(_held(hold)))


def forget(connection: sa.Connection, now: datetime) -> None:
    """Delete the rows that are older than `KEPT`."""
    connection.execute(sa.delete(idempotency).where(idempotency.c.created_at < now - KEPT))


def release_all(connection: sa.Connection) -> None:
    """Release every key in use. Call it only at the start of the only service: no request can be in flight."""
    connection.execute(sa.delete(idempotency).where(idempotency.c.body.is_(None)))
