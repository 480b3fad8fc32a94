"""The rows of releases and of their stored lines. What a line means: `tuneship/service/releases/release_state.py`."""

import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from tuneship.store.database.rows import fetch_all
from tuneship.store.database.tables import ReleaseLineRow, ReleaseRow, release_lines, releases

# Kinds of lines that come every few seconds.
OF_LOOKS = ("look", "probed")


class StoredLine(TypedDict):
    """A line as it is stored, readable again."""

    id: int
    record: str
    number: int
    at: datetime
    line: dict[str, Any]


def of_run(connection: sa.Connection, client_id: str, run_key: str) -> ReleaseRow | None:
    """The release of a run of this client."""
    query = sa.select(releases).where(
        releases.c.client_id == client_id, releases.c.run_key == run_key
    )
    return next(iter(fetch_all(connection, query)), None)


def add_lines(
    connection: sa.Connection,
    release_id: str,
    place: tuple[str, int],
    at: datetime,
    lines: Sequence[tuple[Mapping[str, Any], Mapping[str, Any] | None]],
) -> None:
    """Store lines, each with its point, from a place on: a record and a number. No line may stand there yet."""
    record, first = place
    made = [
        {
            "release_id": release_id,
            "record": record,
            "number": number,
            "at": at,
            "kind": line["kind"],
            "line": _packed(line),
            "point": point,
        }
        for number, (line, point) in enumerate(lines, first)
    ]
    connection.execute(sa.insert(release_lines), made)


def lines_of(
    connection: sa.Connection,
    release_id: str,
    *,
    after: int = 0,
    limit: int | None = None,
    looks: bool = True,
) -> list[StoredLine]:
    """The stored lines after an id, oldest first; `looks`: also those of every look."""
    query = sa.select(release_lines).where(
        release_lines.c.release_id == release_id, release_lines.c.id > after
    )
    if not looks:
        query = query.where(release_lines.c.kind.not_in(OF_LOOKS))
    found: Sequence[ReleaseLineRow] = fetch_all(
        connection, query.order_by(release_lines.c.id).limit(limit)
    )
    return [_readable(row) for row in found]


def points_of(
    connection: sa.Connection, release_id: str, most: int
) -> tuple[int, list[dict[str, Any]]]:
    """The number of looks of a release, and at most so many of them in short, oldest first, with the newest one."""
    is_look = sa.and_(release_lines.c.release_id == release_id, release_lines.c.kind == "look")
    looks = connection.scalar(sa.select(sa.func.count()).where(is_look)) or 0
    # From the end, so that the newest one is among them; only these are decoded.
    from_end = sa.func.row_number().over(order_by=release_lines.c.id.desc()).label("from_end")
    each = sa.select(release_lines.c.id, release_lines.c.point, from_end).where(is_look).subquery()
    step = -(-looks // most) or 1
    query = sa.select(each.c.point).where((each.c.from_end - 1) % step == 0).order_by(each.c.id)
    return looks, [*connection.scalars(query)]


def last_comparison(
    connection: sa.Connection, release_id: str, settling: str
) -> dict[str, Any] | None:
    """The newest look of a release at both deployments; those of the phase `settling` see the candidate alone."""
    query = (
        sa.select(release_lines)
        .where(
            release_lines.c.release_id == release_id,
            release_lines.c.kind == "look",
            release_lines.c.point["phase"].as_string() != settling,
        )
        .order_by(release_lines.c.id.desc())
        .limit(1)
    )
    found: Sequence[ReleaseLineRow] = fetch_all(connection, query)
    return _readable(found[0])["line"] if found else None


def rewrite(connection: sa.Connection, line_id: int, line: Mapping[str, Any]) -> None:
    """Store another content of a line."""
    change = sa.update(release_lines).where(release_lines.c.id == line_id)
    connection.execute(change.values(line=_packed(line)))


def remove_lines(connection: sa.Connection, release_id: str) -> None:
    """Delete the lines of a release."""
    connection.execute(sa.delete(release_lines).where(release_lines.c.release_id == release_id))


def _packed(line: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps(line, separators=(",", ":")).encode())


def _readable(row: ReleaseLineRow) -> StoredLine:
    line = json.loads(zlib.decompress(row["line"]))
    return StoredLine(
        id=row["id"], record=row["record"], number=row["number"], at=row["at"], line=line
    )
