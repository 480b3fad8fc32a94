"""Stored windows of a second, a minute and an hour: every write goes into all of them, a read takes the widest.

A row is a window of one series: a deployment's traffic through one endpoint, or all of it (`EVERY`). The hour's row
holds its sixty minutes' numbers too, so that a month by minutes is 720 rows. Bytes: `tuneship/metrics/columns.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
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
# Seconds for which windows of each width are kept.
KEPT = {
    SECOND: int(timedelta(days=2).total_seconds()),
    MINUTE: int(timedelta(days=90).total_seconds()),
    HOUR: int(timedelta(days=90).total_seconds()),
}
# The endpoint of the series that holds a deployment's whole traffic.
EVERY = ""
AT_ONCE = 400


class StoredWindowKey(NamedTuple):
    """The key of a row; `start` in seconds since the epoch."""

    deployment_id: str
    endpoint_id: str
    width: int
    start: int


@dataclass(frozen=True)
class WindowSource:
    """Whose windows are read: all of a deployment's traffic, or what came through one endpoint."""

    deployment_id: str
    endpoint_id: str = EVERY

    def rows(self, width: int, start: int, end: int) -> sa.ColumnElement[bool]:
        """Windows of a width that start in [start, end)."""
        return sa.and_(
            table.c.deployment_id == self.deployment_id,
            table.c.endpoint_id == self.endpoint_id,
            table.c.width == width,
            table.c.start >= start,
            table.c.start < end,
        )


def oldest(width: int, now: float) -> int:
    """The first moment of which windows of this width are kept: the start of an hour."""
    return int(now - KEPT[width]) // HOUR * HOUR


def store(connection: sa.Connection, windows: Mapping[WindowKey, MetricWindow], now: float) -> None:
    """Add counts to what is stored; the given windows stay as they are, for the case that this is rolled back.

    `now` in seconds since the epoch: what would be forgotten at once is not written.
    """
    finer = {
        StoredWindowKey(key.deployment_id, key.endpoint_id, SECOND, key.start): window
        for key, window in windows.items()
        if not window.is_empty
    }
    minutes: dict[StoredWindowKey, bytes] = {}
    for width in WIDTHS:
        finer = _widened(finer, width)
        fresh = _with_whole_traffic(
            {place: window for place, window in finer.items() if place.start >= oldest(width, now)}
        )
        for places in _batches(sorted(fresh)):
            _add(connection, places, [fresh[place] for place in places], minutes)


def _widened(
    windows: Mapping[StoredWindowKey, MetricWindow], width: int
) -> dict[StoredWindowKey, MetricWindow]:
    wide: dict[StoredWindowKey, MetricWindow] = {}
    for place, window in windows.items():
        start = place.start // width * width
        wider = StoredWindowKey(place.deployment_id, place.endpoint_id, width, start)
        _merge_into(wide, wider, window)
    return wide


def _with_whole_traffic(
    windows: Mapping[StoredWindowKey, MetricWindow],
) -> dict[StoredWindowKey, MetricWindow]:
    whole: dict[StoredWindowKey, MetricWindow] = {}
    for place, window in windows.items():
        for endpoint_id in {place.endpoint_id, EVERY}:
            series = StoredWindowKey(place.deployment_id, endpoint_id, place.width, place.start)
            _merge_into(whole, series, window)
    return whole


def _merge_into(
    windows: dict[StoredWindowKey, MetricWindow], place: StoredWindowKey, more: MetricWindow
) -> None:
    if place not in windows:
        windows[place] = MetricWindow()
    windows[place].merge(more)


def _batches(places: Sequence[StoredWindowKey]) -> Iterator[Sequence[StoredWindowKey]]:
    for first in range(0, len(places), AT_ONCE):
        yield places[first : first + AT_ONCE]


def _add(
    connection: sa.Connection,
    places: Sequence[StoredWindowKey],
    windows: Sequence[MetricWindow],
    minutes: dict[StoredWindowKey, bytes],
) -> None:
    """Read, merge, write. `minutes` collects what minutes have become, for the rows of their hours."""
    kept = _kept(connection, places)
    rank = {place: number for number, place in enumerate(places)}
    both = columns.joined(
        columns.from_windows(windows), columns.from_stored([window for window, _ in kept.values()])
    )
    into = np.array([*range(len(places)), *(rank[place] for place in kept)], np.int64)
    _, whole = columns.grouped(both, into)
    old: list[dict[str, object]] = []
    new: list[dict[str, object]] = []
    for place, encoded in zip(places, whole.encoded(), strict=True):
        values: dict[str, object] = {"window": encoded, "minutes": None}
        if place.width == MINUTE:
            minutes[place] = encoded[: FACTS.itemsize]
        if place.width == HOUR:
            values["minutes"] = _with_minutes(kept.get(place, (b"", None))[1], place, minutes)
        keys = {f"at_{name}": value for name, value in place._asdict().items()}
        (old if place in kept else new).append(keys | values)
    if old:
        at = [table.c[name] == sa.bindparam(f"at_{name}") for name in StoredWindowKey._fields]
        connection.execute(sa.update(table).where(*at), old)
    if new:
        names: dict[str, Any] = {
            name: sa.bindparam(f"at_{name}") for name in StoredWindowKey._fields
        }
        connection.execute(sa.insert(table).values(**names), new)


def _kept(
    connection: sa.Connection, places: Sequence[StoredWindowKey]
) -> dict[StoredWindowKey, tuple[bytes, bytes | None]]:
    key = [table.c[name] for name in StoredWindowKey._fields]
    query = sa.select(*key, table.c.window, table.c.minutes).where(sa.tuple_(*key).in_(places))
    return {
        StoredWindowKey(row.deployment_id, row.endpoint_id, row.width, row.start): (
            row.window,
            row.minutes,
        )
        for row in connection.execute(query)
    }


def _with_minutes(
    kept: bytes | None, hour: StoredWindowKey, minutes: Mapping[StoredWindowKey, bytes]
) -> bytes:
    """The hour's records with those that have changed put in their place."""
    records = bytearray(kept or bytes(HOUR // MINUTE * FACTS.itemsize))
    for number in range(HOUR // MINUTE):
        minute = StoredWindowKey(
            hour.deployment_id, hour.endpoint_id, MINUTE, hour.start + number * MINUTE
        )
        if minute in minutes:
            records[number * FACTS.itemsize : (number + 1) * FACTS.itemsize] = minutes[minute]
    return bytes(records)


def forget(connection: sa.Connection, now: float) -> None:
    """Drop what is older than `KEPT`."""
    for width in WIDTHS:
        is_old = (table.c.width == width) & (table.c.start < oldest(width, now))
        connection.execute(sa.delete(table).where(is_old))


def facts(
    connection: sa.Connection, series: WindowSource, width: int, start: int, end: int
) -> tuple[Whole, Records]:
    """Starts and numbers of the windows of a width that start in [start, end), in rising order; no sketches."""
    if width == MINUTE:
        return _minutes(connection, series, start, end)
    starts, found = sketches(connection, series, width, start, end)
    return starts, found.facts


def _minutes(
    connection: sa.Connection, series: WindowSource, start: int, end: int
) -> tuple[Whole, Records]:
    query = (
        sa.select(table.c.start, table.c.minutes)
        .where(series.rows(HOUR, start // HOUR * HOUR, end))
        .order_by(table.c.start)
    )
    rows = connection.execute(query).all()
    records = np.frombuffer(b"".join([row.minutes for row in rows]), FACTS)
    hours = np.fromiter((row.start for row in rows), np.int64, len(rows))
    starts = (hours[:, None] + np.arange(0, HOUR, MINUTE)).ravel()
    is_meant = (starts >= start) & (starts < end) & columns.is_some(records)
    return starts[is_meant], records[is_meant]


def sketches(
    connection: sa.Connection, series: WindowSource, width: int, start: int, end: int
) -> tuple[Whole, Columns]:
    """Starts and whole windows of a width that start in [start, end), in rising order."""
    query = (
        sa.select(table.c.start, table.c.window)
        .where(series.rows(width, start, end))
        .order_by(table.c.start)
    )
    rows = connection.execute(query).all()
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    return starts, columns.from_stored([row.window for row in rows])


def has_traffic(connection: sa.Connection, series: WindowSource, start: int, end: int) -> bool:
    """Whether anything was recorded in [start, end), to the minute."""
    query = sa.select(table.c.start).where(series.rows(MINUTE, start, end)).limit(1)
    return connection.execute(query).first() is not None


def whole(connection: sa.Connection, series: WindowSource, start: int, end: int) -> Columns:
    """Windows that cover [start, end) once, as wide ones as there are: for a sum over a long span."""
    found = [
        sketches(connection, series, width, low, high)[1]
        for width, low, high in covering(start, end)
    ]
    return columns.joined(*found)


def covering(start: int, end: int) -> list[tuple[int, int, int]]:
    """(width, start, end) of the pieces of a span: hours inside, then minutes, then seconds at the edges."""
    found: list[tuple[int, int, int]] = []
    open_spans = [(start, end)]
    for width in reversed(WIDTHS):
        left: list[tuple[int, int]] = []
        for low, high in open_spans:
            first, last = -(-low // width) * width, high // width * width
            if first < last:
                found.append((width, first, last))
                left += [(low, first), (last, high)]
            else:
                left.append((low, high))
        open_spans = [(low, high) for low, high in left if low < high]
    return found
