"""The rows of console sessions, and of the links that start one. Codes and cookies are known by their digests."""

from datetime import datetime

import sqlalchemy as sa

from tuneship.store.database.tables import (
    ConsoleSessionRow,
    SignInLinkRow,
    console_sessions,
    sign_in_links,
)


def add_link(connection: sa.Connection, link: SignInLinkRow) -> None:
    """Store a link."""
    connection.execute(sa.insert(sign_in_links).values(**link))


def take_link(connection: sa.Connection, digest: bytes, now: datetime) -> sa.RowMapping | None:
    """Remove and return a link that has not expired; None if there is none, or somebody was faster."""
    links = sign_in_links
    taken = sa.delete(links).where(links.c.digest == digest, links.c.expires_at > now)
    return connection.execute(taken.returning(links)).mappings().first()


def add(connection: sa.Connection, session: ConsoleSessionRow) -> None:
    """Store a session."""
    connection.execute(sa.insert(console_sessions).values(**session))


def find(connection: sa.Connection, digest: bytes) -> sa.RowMapping | None:
    """The session of a cookie; None if there is none."""
    query = sa.select(console_sessions).where(console_sessions.c.digest == digest)
    return connection.execute(query).mappings().first()


def note_use(connection: sa.Connection, digest: bytes, now: datetime) -> None:
    """Note that the person did something, unless a later use is stored already."""
    sessions = console_sessions
    noted = sa.update(sessions).where(sessions.c.digest == digest, sessions.c.used_at < now)
    connection.execute(noted.values(used_at=now))


def end(connection: sa.Connection, digest: bytes) -> sa.RowMapping | None:
    """Remove and return a session; None if it was gone already."""
    removed = sa.delete(console_sessions).where(console_sessions.c.digest == digest)
    return connection.execute(removed.returning(console_sessions)).mappings().first()


def forget_ended(connection: sa.Connection, now: datetime, unused_since: datetime) -> None:
    """Remove links and sessions whose time is over, and sessions that nobody has used since a moment."""
    sessions, links = console_sessions, sign_in_links
    is_over = (sessions.c.expires_at <= now) | (sessions.c.used_at <= unused_since)
    connection.execute(sa.delete(sessions).where(is_over))
    connection.execute(sa.delete(links).where(links.c.expires_at <= now))
