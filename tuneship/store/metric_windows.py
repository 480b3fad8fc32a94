"""Stores windows of one second, one minute and one hour: a write updates all three, a read uses the widest that fit.

A row is a window of one series: a deployment's traffic through one endpoint, or all of its traffic (`EVERY`). The row
of an hour also holds the numbers of its sixty minutes, so that a month by the minute is 720 rows. The encoding is in
`tuneship/metrics/columns.py`.

Each member of a cluster writes rows of its own, its *shard*, so that members store at the same time without waiting for
each other. Readers merge the rows of all shards. The leader merges the hours that are over into the shard of a service
alone (`fold`), so that old ones are no more rows than in one service. An observation is counted in one row of each
width, whoever is killed: a member's rows are locked while it, or the leader, reads and replaces them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy as sa

from tuneship.metrics import columns
from tuneship.metrics.columns import FACTS, Columns, Records, Whole
from tuneship.metrics.recorder import WindowKey
from tuneship.metrics.windows import MetricWindow
from tuneship.store.tables import metric_windows as table

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
    """The key of a row; `width` in seconds, `start` in seconds since the epoch, `shard` says whose counts it has."""

    deployment_id: str
    endpoint_id: str
    width: int
    start: int
    shard: int


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


KEY = [table.c[name] for name in StoredWindowKey._fields]


def oldest(width: int, now: float) -> int:
    """Start of the oldest hour for which windows of this width are kept, in seconds since the epoch."""
    return int(now - KEPT_SECONDS[width]) // HOUR * HOUR


def store(
    connection: sa.Connection,
    windows: Mapping[WindowKey, MetricWindow],
    now: float,
    shard: int = WHOLE,
) -> None:
    """Merge windows into the stored ones of a shard, which nobody else writes; `now` in seconds since the epoch.

    The given windows are not changed, so that they can be stored again if the transaction is rolled back. Windows that
    are too old to be kept are not written.
    """
    finer = {
        StoredWindowKey(key.deployment_id, key.endpoint_id, SECOND, key.start, shard): window
        for key, window in windows.items()
        if not window.is_empty
    }
    minutes: dict[StoredWindowKey, bytes] = {}
    for width in WIDTHS:
        # Each width is summed from the one below; one pass merges a window into its endpoint's series and into EVERY.
        wider: dict[StoredWindowKey, MetricWindow] = {}
        fresh: dict[StoredWindowKey, MetricWindow] = {}
        for key, window in finer.items():
            start = key.start // width * width
            _merge_into(wider, key._replace(width=width, start=start), window)
        for key, window in wider.items():
            if key.start >= oldest(width, now):
                for endpoint_id in {key.endpoint_id, EVERY}:
                    _merge_into(fresh, key._replace(endpoint_id=endpoint_id), window)
        finer = wider

        keys = sorted(fresh)
        for first in range(0, len(keys), WINDOWS_PER_QUERY):
            batch = keys[first : first + WINDOWS_PER_QUERY]
            more = columns.from_windows([fresh[key] for key in batch])
            _merge_stored(connection, batch, more, minutes)


def _merge_into(
    windows: dict[StoredWindowKey, MetricWindow], key: StoredWindowKey, more: MetricWindow
) -> None:
    if key not in windows:
        windows[key] = MetricWindow()
    windows[key].merge(more)


def _merge_stored(
    connection: sa.Connection,
    keys: Sequence[StoredWindowKey],
    windows: Columns,
    minutes: dict[StoredWindowKey, bytes],
) -> None:
    """Read the stored windows of `keys`, merge `windows`, one for each, into them, and write them.

    `minutes` collects the new numbers of minutes, which the rows of their hours, written later, hold as well.
    """
    query = sa.select(*KEY, table.c.window, table.c.minutes).where(sa.tuple_(*KEY).in_(keys))
    # Nobody else changes these rows before the transaction ends.
    stored: dict[StoredWindowKey, tuple[bytes, bytes | None]] = {
        StoredWindowKey(*row[: len(KEY)]): (row.window, row.minutes)
        for row in connection.execute(_locked(query))
    }
    index = {key: number for number, key in enumerate(keys)}
    both = columns.joined(windows, columns.from_stored([window for window, _ in stored.values()]))
    groups = np.array([*range(len(keys)), *(index[key] for key in stored)], np.int64)
    _, merged = columns.grouped(both, groups)

    old: list[dict[str, object]] = []
    new: list[dict[str, object]] = []
    for key, encoded in zip(keys, merged.encoded(), strict=True):
        values: dict[str, object] = {"window": encoded, "minutes": None}
        if key.width == MINUTE:
            minutes[key] = encoded[: FACTS.itemsize]
        if key.width == HOUR:
            values["minutes"] = _with_minutes(stored.get(key, (b"", None))[1], key, minutes)
        bound = {f"at_{name}": value for name, value in key._asdict().items()}
        (old if key in stored else new).append(bound | values)
    if old:
        at = [table.c[name] == sa.bindparam(f"at_{name}") for name in StoredWindowKey._fields]
        connection.execute(sa.update(table).where(*at), old)
    if new:
        names: dict[str, Any] = {
            name: sa.bindparam(f"at_{name}") for name in StoredWindowKey._fields
        }
        connection.execute(sa.insert(table).values(**names), new)


def _locked(query: "sa.Select[Any]") -> "sa.Select[Any]":
    # Always in the order of the keys, so that two who lock the same rows do not wait for each other.
    return query.order_by(*KEY).with_for_update()


def _with_minutes(
    stored: bytes | None, hour: StoredWindowKey, minutes: Mapping[StoredWindowKey, bytes]
) -> bytes:
    """The sixty records of an hour, with those of the minutes in `minutes` replaced."""
    records = bytearray(stored or bytes(HOUR // MINUTE * FACTS.itemsize))
    for number in range(HOUR // MINUTE):
        minute = hour._replace(width=MINUTE, start=hour.start + number * MINUTE)
        if minute in minutes:
            records[number * FACTS.itemsize : (number + 1) * FACTS.itemsize] = minutes[minute]
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
    minutes: dict[StoredWindowKey, bytes] = {}
    for width in (MINUTE, HOUR):
        is_apart = table.c.shard != WHOLE
        query = sa.select(*KEY, table.c.window).where(
            series.rows(width, hour, hour + HOUR), is_apart
        )
        rows = connection.execute(_locked(query)).all()
        apart = [StoredWindowKey(*row[: len(KEY)]) for row in rows]
        keys = sorted({key._replace(shard=WHOLE) for key in apart})
        index = {key: number for number, key in enumerate(keys)}
        groups = np.array([index[key._replace(shard=WHOLE)] for key in apart], np.int64)
        _, merged = columns.grouped(columns.from_stored([row.window for row in rows]), groups)
        _merge_stored(connection, keys, merged, minutes)
        for first in range(0, len(apart), WINDOWS_PER_QUERY):
            done = apart[first : first + WINDOWS_PER_QUERY]
            connection.execute(sa.delete(table).where(sa.tuple_(*KEY).in_(done)))


def has_requests(connection: sa.Connection, deployment_id: str, since: float) -> bool:
    """Whether a deployment had requests since a moment, in epoch seconds, or up to an hour before it."""
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
    rows = [row for row in rows if times[row.start] == 1]
    records = np.frombuffer(b"".join([row.minutes for row in rows]), FACTS)
    hours = np.fromiter((row.start for row in rows), np.int64, len(rows))
    starts = (hours[:, None] + np.arange(0, HOUR, MINUTE)).ravel()
    is_wanted = (starts >= start) & (starts < end) & columns.is_some(records)
    starts, records = starts[is_wanted], records[is_wanted]
    # Hours in several shards, the last one or two, are merged from their minutes, whose sketches give the percentiles.
    for hour in (hour for hour, number in times.items() if number > 1):
        low, high = max(start, hour), min(end, hour + HOUR)
        more, windows = sketches(connection, series, MINUTE, low, high)
        starts = np.concatenate([starts, more])
        records = np.concatenate([records, windows.facts])
    order = np.argsort(starts, kind="stable")
    return starts[order], records[order]


def sketches(
    connection: sa.Connection, series: WindowSource, width: int, start: int, end: int
) -> tuple[Whole, Columns]:
    """Starts and complete windows of a width that start in [start, end), ascending."""
    query = (
        sa.select(table.c.start, table.c.window)
        .where(series.rows(width, start, end))
        .order_by(table.c.start)
    )
    rows = connection.execute(query).all()
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    windows = columns.from_stored([row.window for row in rows])
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
