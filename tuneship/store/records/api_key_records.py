"""The rows of API keys. `tuneship/service/access/api_keys.py` decides what a key may do."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.store.database.rows import Row, fetch_all
from tuneship.store.database.tables import api_keys


def find(connection: sa.Connection, identifier: str) -> sa.RowMapping | None:
    """The key with this public part; None if there is none."""
    query = sa.select(api_keys).where(api_keys.c.id == identifier)
    return connection.execute(query).mappings().first()


def all_of(connection: sa.Connection) -> list[Row]:
    """Every key of every client, oldest first."""
    return fetch_all(connection, sa.select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id))


def of_people(connection: sa.Connection, client_id: str) -> list[Row]:
    """The keys of a tenant that stand for people who sign in."""
    query = sa.select(api_keys).where(api_keys.c.client_id == client_id)
    return fetch_all(connection, query.where(api_keys.c.person.is_not(None)))


def ids_of(connection: sa.Connection) -> Sequence[str]:
    """The public parts of all keys."""
    return connection.scalars(sa.select(api_keys.c.id)).all()


def ended(connection: sa.Connection, identifiers: Collection[str], now: datetime) -> set[str]:
    """The revoked or expired ones of these keys."""
    if not identifiers:
        return set()
    has_ended = api_keys.c.revoked_at.is_not(None) | (api_keys.c.expires_at <= now)
    query = sa.select(api_keys.c.id).where(api_keys.c.id.in_(identifiers), has_ended)
    return set(connection.scalars(query))


def add(connection: sa.Connection, values: Row) -> None:
    """Insert a key."""
    connection.execute(sa.insert(api_keys).values(**values))


def change(connection: sa.Connection, identifier: str, **values: Any) -> None:
    """Change fields of a key."""
    connection.execute(sa.update(api_keys).where(api_keys.c.id == identifier).values(**values))
