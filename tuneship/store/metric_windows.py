"""Stores windows of one second, one minute and one hour: a write updates all three, a read uses the widest that fit.

A row is a window of one series: a deployment's traffic through one endpoint, or all of its traffic (`EVERY`). The row
of an hour also holds the numbers of its sixty minutes, so that a month by the minute is 720 rows. The encoding is in
`tuneship/metrics/columns.py`.
"""

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
# The endpoint id of the series with all traffic of a deployment.
EVERY = ""
WINDOWS_PER_QUERY = 400


class StoredWindowKey(NamedTuple):
    """The key of a row; `width` in seconds, `start` in seconds since the epoch."""

    deployment_id: str
    endpoint_id: str
    width: int
    start: int


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


def oldest(width: int, now: float) -> int:
    """Start of the oldest hour for which windows of this width are kept, in seconds since the epoch."""
    return int(now - KEPT_SECONDS[width]) // HOUR * HOUR


def store(connection: sa.Connection, windows: Mapping[WindowKey, MetricWindow], now: float) -> None:
    """Merge windows into the stored ones; `now` in seconds since the epoch.

    The given windows are not changed, so that they can be stored again if the transaction is rolled back. Windows that
    are too old to be kept are not written.
    """
    finer = {
        StoredWindowKey(key.deployment_id, key.endpoint_id, SECOND, key.start): window
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
            _merge_stored(connection, batch, [fresh[key] for key in batch], minutes)


def _merge_into(
    windows: dict[StoredWindowKey, MetricWindow], key: StoredWindowKey, more: MetricWindow
) -> None:
    if key not in windows:
        windows[key] = MetricWindow()
    windows[key].merge(more)


def _merge_stored(
    connection: sa.Connection,
    keys: Sequence[StoredWindowKey],
    windows: Sequence[MetricWindow],
    minutes: dict[StoredWindowKey, bytes],
) -> None:
    """Read the stored windows of `keys`, merge `windows` into them, and write them.

    `minutes` collects the new numbers of minutes, which the rows of their hours, written later, hold as well.
    """
    stored = _stored(connection, keys)
    index = {key: number for number, key in enumerate(keys)}
    both = columns.joined(
        columns.from_windows(windows),
        columns.from_stored([window for window, _ in stored.values()]),
    )
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


def _stored(
    connection: sa.Connection, keys: Sequence[StoredWindowKey]
) -> dict[StoredWindowKey, tuple[bytes, bytes | None]]:
    """The columns `window` and `minutes` of the rows that exist."""
    key = [table.c[name] for name in StoredWindowKey._fields]
    query = sa.select(*key, table.c.window, table.c.minutes).where(sa.tuple_(*key).in_(keys))
    return {
        StoredWindowKey(row.deployment_id, row.endpoint_id, row.width, row.start): (
            row.window,
            row.minutes,
        )
        for row in connection.execute(query)
    }


def _with_minutes(
    stored: bytes | None, hour: StoredWindowKey, minutes: Mapping[StoredWindowKey, bytes]
) -> bytes:
    """The sixty records of an hour, with those of the minutes in `minutes` replaced."""
    records = bytearray(stored or bytes(HOUR // MINUTE * FACTS.itemsize))
    for number in range(HOUR // MINUTE):
        minute = StoredWindowKey(
            hour.deployment_id, hour.endpoint_id, MINUTE, hour.start + number * MINUTE
        )
        if minute in minutes:
            records[number * FACTS.itemsize : (number + 1) * FACTS.itemsize] = minutes[minute]
    return bytes(records)


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
    records = np.frombuffer(b"".join([row.minutes for row in rows]), FACTS)
    hours = np.fromiter((row.start for row in rows), np.int64, len(rows))
    starts = (hours[:, None] + np.arange(0, HOUR, MINUTE)).ravel()
    is_wanted = (starts >= start) & (starts < end) & columns.is_some(records)
    return starts[is_wanted], records[is_wanted]


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
    return starts, columns.from_stored([row.window for row in rows])


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
