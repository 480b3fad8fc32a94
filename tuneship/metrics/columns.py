"""Many windows at once, as columns: merging, percentiles, histograms, cells, and the stored bytes. Pure.

The 43,200 minutes of a month are merged in a tenth of a second, so every metric of an answer is computed here. A
window's bytes are one record of `FACTS`, then its sketch (records of `COUNTED`, sorted by index), then the hashes of up
to `MAX_CALLERS` callers who got errors. Those are the smallest hashes, so that windows can be merged and the number of
more callers than these can be estimated from their density.

The finer counts are in bytes of their own: one record of `MORE`, and the lists behind it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuneship.metrics.lists import Lists, Whole, beside, packed, steps, summed, unpacked
from tuneship.metrics.windows import (
    CELLS_PER_DOUBLING,
    LONGEST_MS,
    MAPPING,
    SHORTEST_MS,
    MetricWindow,
)

Records = NDArray[np.void]
Numbers = NDArray[np.float64]

# Upper edges of the published histogram, 1 ms to 131,072 ms; one more bucket counts everything.
EDGES_MS: tuple[float, ...] = tuple(float(2**power) for power in range(18))
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
COUNTS = ("requests", "errors", "empty", "input", "output")
UNANSWERED = ("cancelled", "refused")
SUMS = (*COUNTS, "latency_sum_ms", *UNANSWERED)
FACTS = np.dtype(
    [
        *((name, "<i8") for name in COUNTS),
        ("latency_sum_ms", "<f8"),
        *((name, "<f8") for name in QUANTILES),  # ms; 0 where no request was timed
        ("histogram", "<u4", (len(EDGES_MS) + 1,)),  # timed requests that took at most each edge
        *((name, "<i8") for name in UNANSWERED),
        # Exact below `MAX_CALLERS`, then an estimate within a few per cent, as the other numbers of callers.
        ("error_callers", "<i8"),
    ]
)
# Requests that the gates leave out (`Recorder.record`).
REPEATED = tuple(
    f"repeated_{kind}" for kind in ("requests", "errors", "empty", "cancelled", "refused")
)
_LARGEST = ("spread_keys", "replicas")
CALLERS = ("error_callers", "cancelled_callers", "refused_callers")
CELLS = ("per_token", "answer_tokens")
MORE = np.dtype([(name, "<u4") for name in (*REPEATED, *CALLERS[1:], *_LARGEST)])
COUNTED = np.dtype([("index", "<i2"), ("count", "<u4")])
CALLER = np.dtype("<u4")
STICKY = np.dtype([("index", "<u4"), ("count", "<u4")])
MAX_CALLERS = 256
MAX_STICKY = 24
# The lists that are stored behind a record of `MORE`, in this order.
_STORED: Final = {
    **dict.fromkeys(CELLS, COUNTED),
    "sticky_keys": STICKY,
    **dict.fromkeys(CALLERS[1:], CALLER),
}

_LOWEST = MAPPING.key(SHORTEST_MS)
# Latency of each sketch index, from `_LOWEST` on.
_VALUES_MS = np.array(
    [MAPPING.value(index) for index in range(_LOWEST, MAPPING.key(LONGEST_MS) + 1)], dtype="f8"
)
_BUCKETS = np.searchsorted(np.array(EDGES_MS), _VALUES_MS)
_CELLS = np.ceil(CELLS_PER_DOUBLING * np.log2(_VALUES_MS)).astype("<i2")


@dataclass(frozen=True)
class Columns:
    """Windows in rows."""

    facts: Records
    more: Records
    latencies: Lists
    per_token: Lists
    answer_tokens: Lists
    error_callers: Lists
    cancelled_callers: Lists
    refused_callers: Lists
    sticky_keys: Lists

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.facts)

    @property
    def lists(self) -> tuple[Lists, ...]:
        """All lists, in the order of the fields."""
        return tuple(getattr(self, name) for name in _LISTS)

    def part(self, first: int, last: int) -> "Columns":
        """The rows from `first` to the one before `last`."""
        lists = (one.part(first, last) for one in self.lists)
        return Columns(self.facts[first:last], self.more[first:last], *lists)

    def encoded(self) -> list[bytes]:
        """The stored bytes of each window, without the finer counts."""
        rows = zip(self.facts, self.latencies.rows(), self.error_callers.rows(), strict=True)
        return [b"".join([one.tobytes() for one in row]) for row in rows]

    def encoded_more(self) -> list[bytes]:
        """The stored bytes of each window's detailed counts: the record, the lengths of the lists, and the lists."""
        named = [getattr(self, name) for name in _STORED]
        record = [self.more[name].astype(np.int64) for name in MORE.names or ()]
        head = np.stack([*record, *(lists.lengths for lists in named)], axis=1)
        parts = [Lists(head.ravel(), np.full(len(self), head.shape[1]))]
        for lists in named:
            kind = lists.values.dtype
            indexes = lists.values if kind == CALLER else lists.values["index"]
            parts.append(steps(Lists(indexes, lists.lengths)))
            if kind != CALLER:
                parts.append(Lists(lists.values["count"], lists.lengths))
        return packed(beside(*parts))


_LISTS = tuple(name for name in Columns.__dataclass_fields__ if name not in ("facts", "more"))


def from_stored(windows: Sequence[bytes], more: Sequence[bytes]) -> Columns:
    """The inverse of `Columns.encoded` and `encoded_more`."""
    facts = np.frombuffer(b"".join([window[: FACTS.itemsize] for window in windows]), FACTS)
    # The number of callers may be an estimate, but no more than `MAX_CALLERS` are stored.
    stored_callers = np.minimum(facts["error_callers"], MAX_CALLERS)
    sizes = np.fromiter(map(len, windows), np.int64, len(windows))
    ends = sizes - stored_callers * CALLER.itemsize
    parts = list(zip(windows, ends.tolist(), strict=True))
    sketches = b"".join([window[FACTS.itemsize : end] for window, end in parts])
    lengths = (ends - FACTS.itemsize) // COUNTED.itemsize
    hashes = np.frombuffer(b"".join([window[end:] for window, end in parts]), CALLER)
    record, lists = _from_more(more)
    return Columns(
        facts,
        record,
        latencies=Lists(np.frombuffer(sketches, COUNTED), lengths),
        error_callers=Lists(hashes, stored_callers),
        **lists,
    )


def _from_more(stored: Sequence[bytes]) -> tuple[Records, dict[str, Lists]]:
    names = MORE.names or ()
    size = len(names) + len(_STORED)
    numbers = unpacked(stored)
    head = numbers.values[numbers.firsts[:, None] + np.arange(size)]
    more = np.zeros(len(stored), MORE)
    for place, name in enumerate(names):
        more[name] = head[:, place]
    starts = numbers.firsts + size
    lists: dict[str, Lists] = {}
    for place, (name, kind) in enumerate(_STORED.items(), len(names)):
        lengths: Whole = head[:, place]
        one = Lists(numbers.values, lengths)
        places = np.repeat(starts, lengths) + one.places
        indexes = summed(Lists(numbers.values[places], lengths))
        starts = starts + lengths
        if kind == CALLER:
            lists[name] = Lists(indexes.astype(CALLER), lengths)
            continue
        values: Any = np.empty(len(indexes), kind)
        values["index"] = indexes
        values["count"] = numbers.values[places + np.repeat(lengths, lengths)]
        lists[name] = Lists(values, lengths)
        starts = starts + lengths
    return more, lists


def from_windows(windows: Sequence[MetricWindow]) -> Columns:
    """The counts of each window; percentiles, histogram and callers are still zero (see `grouped`)."""
    facts, more = np.zeros(len(windows), FACTS), np.zeros(len(windows), MORE)
    for row, finer, window in zip(facts, more, windows, strict=True):
        row["requests"], row["errors"] = window.request_count, window.error_count
        row["empty"], row["latency_sum_ms"] = window.empty_count, window.latency_sum_ms
        row["input"], row["output"] = window.input_tokens, window.output_tokens
        row["cancelled"], row["refused"] = window.cancelled_count, window.refused_count
        for name in (*REPEATED, *_LARGEST):
            finer[name] = getattr(window, name)

    def listed(name: str, kind: np.dtype[Any]) -> Lists:
        rows: list[Any] = [getattr(window, name) for window in windows]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        if kind is CALLER:
            return Lists(np.array([one for row in rows for one in row], kind), lengths)
        return Lists(
            np.array([pair for row in rows for pair in sorted(row.items())], kind), lengths
        )

    kinds = {"latencies": COUNTED, "error_callers": CALLER, **_STORED}
    return Columns(facts, more, **{name: listed(name, kind) for name, kind in kinds.items()})


def joined(*parts: Columns) -> Columns:
    """The rows of all parts, one part after the other."""
    return Columns(
        np.concatenate([part.facts for part in parts]),
        np.concatenate([part.more for part in parts]),
        *(
            Lists(
                np.concatenate([one.values for one in lists]),
                np.concatenate([one.lengths for one in lists]),
            )
            for lists in zip(*(part.lists for part in parts), strict=True)
        ),
    )


def grouped(columns: Columns, groups: Whole) -> tuple[Whole, Columns]:
    """Merge the windows of each group into one, with percentiles and histogram.

    `groups` holds the group of each row. Returns the distinct groups in ascending order, and their windows.
    """
    distinct, into = np.unique(groups, return_inverse=True)
    facts, more = np.zeros(len(distinct), FACTS), np.zeros(len(distinct), MORE)
    for record, names, given in ((facts, SUMS, columns.facts), (more, REPEATED, columns.more)):
        for name in names:
            total: Any = np.zeros(len(distinct), record.dtype[name])
            np.add.at(total, into, given[name])
            record[name] = total
    for name in _LARGEST:
        np.maximum.at(more[name], into, columns.more[name])

    lists = {
        name: _added(len(facts), into, getattr(columns, name)) for name in ("latencies", *CELLS)
    }
    _fill_in_quantiles(facts, lists["latencies"])
    limits = facts["errors"], facts["cancelled"], facts["refused"]
    for name, limit in zip(CALLERS, limits, strict=True):
        numbers, lists[name] = _united(limit, into, getattr(columns, name))
        (facts if name == CALLERS[0] else more)[name] = numbers
    lists["sticky_keys"] = _most_frequent(_added(len(facts), into, columns.sticky_keys))
    return distinct, Columns(facts, more, **lists)


def _united(limit: Whole, into: Whole, callers: Lists) -> tuple[Whole, Lists]:
    """How many distinct callers each group has, at most `limit`, and the smallest of their hashes."""
    # Group and caller's hash in one number, so that one call finds the distinct pairs in order.
    keys = np.unique((np.repeat(into, callers.lengths) << 32) + callers.values)
    rows, hashes = keys >> 32, keys & 0xFFFF_FFFF
    numbers = np.bincount(rows, minlength=len(limit))
    firsts = np.cumsum(numbers) - numbers
    is_kept = np.arange(len(rows)) - firsts[rows] < MAX_CALLERS
    kept = Lists(hashes[is_kept].astype(CALLER), np.minimum(numbers, MAX_CALLERS))
    # Hashes are uniform over 32 bits, so the k-th smallest of n lies near k / n of the range.
    many = np.flatnonzero(numbers >= MAX_CALLERS)
    highest = hashes[firsts[many] + MAX_CALLERS - 1]
    estimated = ((MAX_CALLERS - 1) * 2.0**32 / (highest + 1)).astype(np.int64)
    numbers[many] = np.clip(estimated, MAX_CALLERS, limit[many])
    return numbers, kept


def _added(number: int, into: Whole, lists: Lists) -> Lists:
    """The counts of each of `number` groups, sorted by index, with equal indexes added up."""
    # Row and index in one number, so that counts with equal keys are added up in one call.
    keys = (np.repeat(into, lists.lengths) << 33) + lists.values["index"].astype(np.int64)
    keys += 2**32
    count = lists.values["count"]
    # Lists of a single window each are sorted already, and sorting is the slow part.
    if not np.all(keys[1:] >= keys[:-1]):
        order = np.argsort(keys, kind="stable")
        keys, count = keys[order], count[order]
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    count = np.add.reduceat(count.astype(np.int64), firsts) if len(firsts) else firsts
    # Half of each group's range is below zero.
    rows = keys[firsts] >> 33
    added = np.empty(len(rows), lists.values.dtype)
    added["index"], added["count"] = (keys[firsts] & (2**33 - 1)) - 2**32, count
    return Lists(added, np.bincount(rows, minlength=number))


def _most_frequent(keys: Lists) -> Lists:
    """The sticky keys of each row with the most requests."""
    if not np.any(keys.lengths > MAX_STICKY):
        return keys
    rows = keys.owners
    order = np.lexsort((-keys.values["count"].astype(np.int64), rows))
    is_kept = np.arange(len(rows)) - keys.firsts[rows] < MAX_STICKY
    kept = np.sort(order[is_kept])
    return Lists(keys.values[kept], np.minimum(keys.lengths, MAX_STICKY))


def _fill_in_quantiles(facts: Records, latencies: Lists) -> None:
    """Compute percentiles and histogram from the sketches of the same rows."""
    rows = latencies.owners
    place = latencies.values["index"].astype(np.int64) - _LOWEST
    count = latencies.values["count"].astype(np.int64)
    buckets = len(EDGES_MS) + 1
    cells = np.bincount(
        rows * buckets + _BUCKETS[place], weights=count, minlength=len(facts) * buckets
    )
    facts["histogram"] = cells.reshape(len(facts), buckets).cumsum(axis=1)
    # The sketches of all rows lie in one array: the rank within a row is counted from the rows before it.
    cumulative = np.cumsum(count)
    timed = timed_requests(facts)
    is_any = timed > 0
    before = (np.cumsum(timed) - timed)[is_any]
    for name, quantile in QUANTILES.items():
        rank = np.floor(quantile * (timed[is_any] - 1)).astype(np.int64)
        positions = np.searchsorted(cumulative, before + rank + 1)
        facts[name][is_any] = _VALUES_MS[place[positions]]


def cells(lists: Lists, *, is_sketch: bool = False) -> Lists:
    """Counts by cell, sorted, each cell once; `is_sketch`: latencies, indexed like a sketch."""
    values = lists.values
    if is_sketch:
        values = values.copy()
        values["index"] = _CELLS[values["index"].astype(np.int64) - _LOWEST]
    rows = np.arange(len(lists.lengths))
    return _added(len(rows), rows, Lists(values, lists.lengths))


def requests_of(facts: Records) -> Whole:
    """All requests of each record, cancelled and refused ones included."""
    return facts["requests"] + facts["cancelled"] + facts["refused"]


def callers_of_half(windows: Columns) -> list[int]:
    """The smallest number of callers who sent half of each window's requests.

    A request that the split drew by itself is a caller of its own.
    """
    found: list[int] = []
    totals = requests_of(windows.facts).tolist()
    for total, keys in zip(totals, windows.sticky_keys.rows(), strict=True):
        wanted, number = -(-total // 2), 0
        for count in sorted(keys["count"].tolist(), reverse=True):
            if wanted <= 0:
                break
            wanted, number = wanted - count, number + 1
        found.append(number + max(wanted, 0))
    return found


def timed_requests(facts: Records) -> Whole:
    """The successful requests of each record whose latency was counted: all but those of batches."""
    return facts["histogram"][:, -1].astype(np.int64)


def histogram_of(sketch: Mapping[int, int]) -> list[int]:
    """How many values of one sketch are at most each of `EDGES_MS`; the last number counts all."""
    places = np.fromiter(sketch, np.int64, len(sketch)) - _LOWEST
    counts = np.fromiter(sketch.values(), np.int64, len(sketch))
    cells = np.bincount(_BUCKETS[places], weights=counts, minlength=len(EDGES_MS) + 1)
    return cells.cumsum().astype(np.int64).tolist()


def is_some(facts: Records) -> NDArray[np.bool_]:
    """True for records that count at least one request."""
    return requests_of(facts) > 0
