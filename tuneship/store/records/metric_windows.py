"""Stores windows of one second, one minute and one hour: a write updates all three, a read uses the widest that fit.

A row is a window of one series: a deployment's traffic through one endpoint, or all of its traffic (`EVERY`). The row
of an hour also holds the numbers of its sixty minutes, unless it is a member's, so that a month by the minute is 720
rows. The encoding is in `tuneship/metrics/columns.py`. The finer counts of a window are in a row of another table.

Each member of a cluster writes rows of its own, its *shard*, so that members store at the same time without waiting for
each other. Readers merge the rows of all shards. The leader merges the hours that are over into the shard of a service
alone (`fold`), so that old ones are no more rows than in one service. An observation is counted in one row of each
width, whoever is killed: a member's rows are locked while it, or the leader, reads and replaces them.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tuneship.metrics import columns
from tuneship.metrics.columns import FACTS, Columns, Records, Whole
from tuneship.metrics.recorder import WindowKey
from tuneship.metrics.windows import MetricWindow
from tuneship.store.database.tables import finer_windows as finer
from tuneship.store.database.tables import metric_windows as table

SECOND, MINUTE, HOUR = 1, 60, 3600
WIDTHS = (SECOND, MINUTE, HOUR)
# How many seconds the windows of each width are kept.
KEPT_SECONDS = {
    SECOND: int(timedelta(days=2).total_seconds()),
    MINUTE: int(timedelta(days=90).total_seconds()),
    HOUR: int(timedelta(days=90).total_seconds()),
}
# The shard of a service alone, and of the hours that the leader has merged.
WHOLE = 0
# How long after the end of an hour its windows are merged; whatever is stored later is merged the next time.
FOLDED_AFTER_S = 600
# The endpoint id of the series with all traffic of a deployment.
EVERY = ""
WINDOWS_PER_QUERY = 400


class StoredWindowKey(NamedTuple):
    """The key of a row; `width` in seconds, `start` in epoch seconds, `shard`: the member whose counts it has."""

    deployment_id: str
    endpoint_id: str
    width: int
    start: int
    shard: int


class WrittenWindow(NamedTuple):
    """A row as it is written: its key, the window, and the minutes of an hour."""

    key: StoredWindowKey
    window: bytes
    minutes: bytes | None

    @property
    def values(self) -> dict[str, Any]:
        """The columns of the row, without its key."""
        return {"window": self.window, "minutes": self.minutes}


@dataclass(frozen=True)
class WindowSource:
    """The series that is read: all traffic of a deployment, or its traffic through one endpoint."""

    deployment_id: str
    endpoint_id: str = EVERY

    def rows(self, width: int, start: int, end: int) -> sa.ColumnElement[bool]:
        """Condition for the windows of a width that start in [start, end)."""
        return sa.and_(
            table.c.deployment_id == self.deployment_id,
            table.c.endpoint_id == self.endpoint_id,
            table.c.width == width,
            table.c.start >= start,
            table.c.start < end,
        )


# By the key of an hour: what has changed of its minutes, by their number.
ChangedMinutes = defaultdict[StoredWindowKey, dict[int, bytes]]
KEY = [table.c[name] for name in StoredWindowKey._fields]
VALUES = [table.c.window, table.c.minutes]


def oldest(width: int, now: float) -> int:
    """Start of the oldest hour for which windows of this width are kept, in seconds since the epoch."""
    return int(now - KEPT_SECONDS[width]) // HOUR * HOUR


def store(
    connection: sa.Connection,
    windows: Mapping[WindowKey, MetricWindow],
    now: float,
    shard: int = WHOLE,
) -> None:
    """Merge windows into the stored ones of a shard, which has no other writer; `now` in epoch seconds.

    The given windows are not changed, so that they can be stored again if the transaction is rolled back. Windows that
    are too old to be kept are not written.
    """
    # Each window counts twice: for the series of its endpoint, and for the one of all traffic.
    targets = [
        (StoredWindowKey(key.deployment_id, endpoint_id, SECOND, key.start, shard), window)
        for key, window in windows.items()
        if not window.is_empty
        for endpoint_id in {key.endpoint_id, EVERY}
    ]
    given = columns.from_windows([window for _, window in targets])
    minutes: ChangedMinutes = defaultdict(dict)
    for width in WIDTHS:
        wider = [key._replace(width=width, start=key.start // width * width) for key, _ in targets]
        keys = sorted({key for key in wider if key.start >= oldest(width, now)})
        index = {key: number for number, key in enumerate(keys)}
        # Windows that are too old are put together behind all others, and left there.
        groups = np.array([index.get(key, len(keys)) for key in wider], np.int64)
        _, fresh = columns.grouped(given, groups)
        for first in range(0, len(keys), WINDOWS_PER_QUERY):
            batch = keys[first : first + WINDOWS_PER_QUERY]
            more = fresh.part(first, first + len(batch))
            _merge_stored(connection, batch, more, minutes)


def _merge_stored(
    connection: sa.Connection,
    keys: Sequence[StoredWindowKey],
    windows: Columns,
    minutes: ChangedMinutes,
) -> None:
    """Read the stored windows of `keys`, merge one of `windows` into each, and write them.

    `minutes` collects the new numbers of minutes. The rows of their hours, written later, hold them as well, except
    those of a member: to write these sixty records again and again would be most of the work.
    """
    # Nobody else changes these rows before the transaction ends.
    query = _with_finer(*KEY, *VALUES).where(_is_among(connection, keys))
    found = connection.execute(_locked(query)).all()
    stored = {StoredWindowKey(*row[: len(KEY)]): row.minutes for row in found}
    index = {key: number for number, key in enumerate(keys)}
    both = columns.joined(windows, columns.from_stored(*_bytes_of(found)))
    groups = np.array([*range(len(keys)), *(index[key] for key in stored)], np.int64)
    _, merged = columns.grouped(both, groups)

    old: list[WrittenWindow] = []
    new: list[WrittenWindow] = []
    for key, encoded in zip(keys, merged.encoded(), strict=True):
        of_hour = None
        if key.width == MINUTE:
            hour = key._replace(width=HOUR, start=key.start // HOUR * HOUR)
            minutes[hour][(key.start - hour.start) // MINUTE] = encoded[: FACTS.itemsize]
        if key.width == HOUR and key.shard == WHOLE:
            of_hour = _with_minutes(stored.get(key), minutes[key])
        (old if key in stored else new).append(WrittenWindow(key, encoded, of_hour))
    if old:
        _replace(connection, old)
    if new:
        _insert(connection, new)
    _write_finer(connection, dict(zip(keys, merged.encoded_more(), strict=True)))


def _with_finer(*chosen: "sa.ColumnElement[Any]") -> "sa.Select[Any]":
    """Select columns of the windows, and their finer counts."""
    is_its = sa.and_(*(column == finer.c[column.name] for column in KEY))
    return sa.select(*chosen, finer.c.counts).select_from(sa.join(table, finer, is_its))


def _bytes_of(rows: Sequence["sa.Row[Any]"]) -> tuple[list[bytes], list[bytes]]:
    return [row.window for row in rows], [row.counts for row in rows]


def _locked(query: "sa.Select[Any]") -> "sa.Select[Any]":
    # Always in the order of the keys, so that two who lock the same rows do not wait for each other.
    return query.order_by(*KEY).with_for_update(of=table)


def _is_among(connection: sa.Connection, keys: Sequence[StoredWindowKey]) -> sa.ColumnElement[bool]:
    """Condition for the rows of these keys."""
    if connection.dialect.name == "sqlite":
        return sa.tuple_(*KEY).in_(keys)
    # With a parameter for each value Postgres takes longer to plan the query than to carry it out.
    given = _record_set(KEY, [key._asdict() for key in keys])
    return sa.and_(*(column == given.c[column.name] for column in KEY))


def _record_set(
    names: "Sequence[sa.ColumnClause[Any]]", rows: Sequence[Mapping[str, Any]]
) -> sa.TableValuedAlias:
    """Rows that are one parameter of a statement of Postgres."""
    given = sa.cast(sa.bindparam(None, orjson.dumps(rows).decode(), sa.Text), postgresql.JSON)
    found = [sa.column(column.name, column.type) for column in names]
    return sa.func.json_to_recordset(given).table_valued(*found).render_derived(with_types=True)


def _insert(connection: sa.Connection, rows: Sequence[WrittenWindow]) -> None:
    """Insert rows. Raises `IntegrityError` where somebody else was faster."""
    if connection.dialect.name == "sqlite":
        values = [row.key._asdict() | row.values for row in rows]
        connection.execute(sa.insert(table), values)
    else:
        connection.execute(sa.insert(table).from_select([*KEY, *VALUES], _query(rows)))


def _replace(connection: sa.Connection, rows: Sequence[WrittenWindow]) -> None:
    """Replace the contents of existing, locked rows."""
    if connection.dialect.name == "sqlite":
        at = [column == sa.bindparam(f"at_{column.name}") for column in KEY]
        values = [
            {f"at_{name}": value for name, value in row.key._asdict().items()} | row.values
            for row in rows
        ]
        connection.execute(sa.update(table).where(*at), values)
    else:
        given = _query(rows).subquery()
        at = [column == given.c[column.name] for column in KEY]
        values = {column.name: given.c[column.name] for column in VALUES}
        connection.execute(sa.update(table).where(*at).values(**values))


def _write_finer(connection: sa.Connection, counts: Mapping[StoredWindowKey, bytes]) -> None:
    """Insert or replace the finer counts of windows whose rows this transaction has written."""
    if connection.dialect.name == "sqlite":
        insert = sqlite.insert(finer)
        values = [key._asdict() | {"counts": stored} for key, stored in counts.items()]
    else:
        places: list[dict[str, Any]] = []
        at = 1
        for key, stored in counts.items():
            places.append(key._asdict() | {"at": at, "bytes": len(stored)})
            at += len(stored)
        numbers = [sa.column(name, sa.Integer) for name in ("at", "bytes")]
        given = _record_set([*KEY, *numbers], places)
        found = sa.func.substring(b"".join(counts.values()), given.c.at, given.c.bytes)
        names = [*StoredWindowKey._fields, "counts"]
        query = sa.select(*(given.c[column.name] for column in KEY), found)
        insert, values = postgresql.insert(finer).from_select(names, query), None
    changed = {"counts": insert.excluded.counts}
    at_keys = [finer.c[name] for name in StoredWindowKey._fields]
    connection.execute(insert.on_conflict_do_update(index_elements=at_keys, set_=changed), values)


def _query(rows: Sequence[WrittenWindow]) -> "sa.Select[Any]":
    """Rows that Postgres is sent in three parameters: their keys, all windows, and all minutes."""
    places: list[dict[str, Any]] = []
    window_at = minutes_at = 1
    for row in rows:
        place = {"window_at": window_at, "window_bytes": len(row.window)}
        if row.minutes is not None:
            place |= {"minutes_at": minutes_at, "minutes_bytes": len(row.minutes)}
            minutes_at += len(row.minutes)
        places.append(row.key._asdict() | place)
        window_at += len(row.window)
    names = ("window_at", "window_bytes", "minutes_at", "minutes_bytes")
    given = _record_set([*KEY, *(sa.column(name, sa.Integer) for name in names)], places)
    windows = b"".join([row.window for row in rows])
    minutes = b"".join([row.minutes or b"" for row in rows])
    return sa.select(
        *(given.c[column.name] for column in KEY),
        sa.func.substring(windows, given.c.window_at, given.c.window_bytes).label("window"),
        sa.func.substring(minutes, given.c.minutes_at, given.c.minutes_bytes).label("minutes"),
    )


def _with_minutes(stored: bytes | None, changed: Mapping[int, bytes]) -> bytes:
    """The sixty records of an hour, by minute, with the changed ones replaced."""
    records = bytearray(stored or bytes(HOUR // MINUTE * FACTS.itemsize))
    for number, record in changed.items():
        records[number * FACTS.itemsize : (number + 1) * FACTS.itemsize] = record
    return bytes(records)


def to_fold(connection: sa.Connection, now: float) -> Sequence[tuple[WindowSource, int]]:
    """The series and hours, by their start, that are over and still in several shards."""
    is_over = table.c.start <= now - HOUR - FOLDED_AFTER_S
    key = table.c.start, table.c.deployment_id, table.c.endpoint_id
    query = sa.select(*key).where(table.c.width == HOUR, is_over, table.c.shard != WHOLE)
    found = connection.execute(query.distinct().order_by(*key))
    return [(WindowSource(row.deployment_id, row.endpoint_id), row.start) for row in found]


def fold(connection: sa.Connection, series: WindowSource, hour: int) -> None:
    """Merge the minutes and the hour of a series' shards; its seconds stay apart until they are forgotten.

    There may be thousands of seconds, and they are kept for two days only.
    """
    minutes: ChangedMinutes = defaultdict(dict)
    for width in (MINUTE, HOUR):
        is_apart = table.c.shard != WHOLE
        query = _with_finer(*KEY, table.c.window).where(
            series.rows(width, hour, hour + HOUR), is_apart
        )
        rows = connection.execute(_locked(query)).all()
        apart = [StoredWindowKey(*row[: len(KEY)]) for row in rows]
        keys = sorted({key._replace(shard=WHOLE) for key in apart})
        index = {key: number for number, key in enumerate(keys)}
        groups = np.array([index[key._replace(shard=WHOLE)] for key in apart], np.int64)
        _, merged = columns.grouped(columns.from_stored(*_bytes_of(rows)), groups)
        _merge_stored(connection, keys, merged, minutes)
        for first in range(0, len(apart), WINDOWS_PER_QUERY):
            done = apart[first : first + WINDOWS_PER_QUERY]
            for one in (table, finer):
                keys_of = sa.tuple_(*(one.c[name] for name in StoredWindowKey._fields))
                connection.execute(sa.delete(one).where(keys_of.in_(done)))


def has_requests(connection: sa.Connection, deployment_id: str, since: float) -> bool:
    """Whether a deployment had requests since a moment (epoch seconds), or up to an hour before it."""
    query = sa.select(table.c.start).where(
        table.c.deployment_id == deployment_id,
        table.c.width == HOUR,
        table.c.start > since - HOUR,
    )
    return connection.execute(query.limit(1)).first() is not None


def forget(connection: sa.Connection, now: float) -> None:
    """Delete the windows that are older than `KEPT_SECONDS`."""
    for width in WIDTHS:
        is_old = (table.c.width == width) & (table.c.start < oldest(width, now))
        # Found through the index of their windows, so that they need none.
        keys_of = sa.tuple_(*(finer.c[name] for name in StoredWindowKey._fields))
        connection.execute(sa.delete(finer).where(keys_of.in_(sa.select(*KEY).where(is_old))))
        connection.execute(sa.delete(table).where(is_old))


def facts(
    connection: sa.Connection, series: WindowSource, width: int, start: int, end: int
) -> tuple[Whole, Records]:
    """Starts and numbers of the windows of a width that start in [start, end), ascending, without sketches."""
    if width != MINUTE:
        starts, windows = sketches(connection, series, width, start, end)
        return starts, windows.facts

    # Minutes are read from the rows of their hours, of which there are sixty times fewer.
    query = (
        sa.select(table.c.start, table.c.minutes)
        .where(series.rows(HOUR, start // HOUR * HOUR, end))
        .order_by(table.c.start)
    )
    rows = connection.execute(query).all()
    times = Counter(row.start for row in rows)
    apart = {row.start for row in rows if row.minutes is None or times[row.start] > 1}
    rows = [row for row in rows if row.start not in apart]
    records = np.frombuffer(b"".join([row.minutes for row in rows]), FACTS)
    hours = np.fromiter((row.start for row in rows), np.int64, len(rows))
    starts = (hours[:, None] + np.arange(0, HOUR, MINUTE)).ravel()
    is_wanted = (starts >= start) & (starts < end) & columns.is_some(records)
    starts, records = starts[is_wanted], records[is_wanted]
    # Hours of members, the last one or two, are merged from their minutes, whose sketches give the percentiles.
    for hour in sorted(apart):
        low, high = max(start, hour), min(end, hour + HOUR)
        more, windows = sketches(connection, series, MINUTE, low, high)
        starts = np.concatenate([starts, more])
        records = np.concatenate([records, windows.facts])
    order = np.argsort(starts, kind="stable")
    return starts[order], records[order]


def sketches(
    connection: sa.Connection, series: WindowSource, width: int, start: int, end: int
) -> tuple[Whole, Columns]:
    """The windows of one width that start in [start, end), with their starts, ascending."""
    query = (
        _with_finer(table.c.start, table.c.window)
        .where(series.rows(width, start, end))
        .order_by(table.c.start)
    )
    rows = connection.execute(query).all()
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    windows = columns.from_stored(*_bytes_of(rows))
    if np.any(starts[1:] == starts[:-1]):  # they are in several shards
        return columns.grouped(windows, starts)
    return starts, windows


def has_traffic(connection: sa.Connection, series: WindowSource, start: int, end: int) -> bool:
    """Whether a window of a minute that starts in [start, end) has any observation."""
    query = sa.select(table.c.start).where(series.rows(MINUTE, start, end)).limit(1)
    return connection.execute(query).first() is not None


def whole(connection: sa.Connection, series: WindowSource, start: int, end: int) -> Columns:
    """The fewest windows that cover [start, end) exactly once: to sum over a long span."""
    pieces = [
        sketches(connection, series, width, low, high)[1]
        for width, low, high in covering(start, end)
    ]
    return columns.joined(*pieces)


def covering(start: int, end: int) -> list[tuple[int, int, int]]:
    """Split a span into (width, start, end): hours in the middle, then minutes, then seconds at the edges."""
    pieces: list[tuple[int, int, int]] = []
    open_spans = [(start, end)]
    for width in reversed(WIDTHS):
        rest: list[tuple[int, int]] = []
        for low, high in open_spans:
            # The largest part of the span that windows of this width fill; its edges are left for narrower ones.
            first, last = -(-low // width) * width, high // width * width
            if first < last:
                pieces.append((width, first, last))
                rest += [(low, first), (last, high)]
            else:
                rest.append((low, high))
        open_spans = [(low, high) for low, high in rest if low < high]
    return pieces
