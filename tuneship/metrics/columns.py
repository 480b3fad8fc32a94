"""Many windows at once, as columns: merging, percentiles, histograms, and the stored bytes. Pure.

The 43,200 minutes of a month are merged in a tenth of a second, so every metric of an answer is computed here. A
window's bytes are one record of `FACTS`, then its sketch (records of `COUNTED`, sorted by index), then the hashes of up
to `MAX_CALLERS` callers who got errors. Those are the smallest hashes, so that windows can be merged and the number of
more callers than these can be estimated from their density.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuneship.metrics.windows import LONGEST_MS, MAPPING, SHORTEST_MS, MetricWindow

Records = NDArray[np.void]
Whole = NDArray[np.int64]
Numbers = NDArray[np.float64]

# Upper edges of the published histogram, 1 ms to 131,072 ms; one more bucket counts everything.
EDGES_MS: tuple[float, ...] = tuple(float(2**power) for power in range(18))
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
COUNTS = ("requests", "errors", "empty", "input", "output")
# `uncounted`: requests recorded before the other two and the callers were counted (schema 0007).
LATER_COUNTS = ("cancelled", "refused", "uncounted")
SUMS = (*COUNTS, "latency_sum_ms", *LATER_COUNTS)
FACTS = np.dtype(
    [
        *((name, "<i8") for name in COUNTS),
        ("latency_sum_ms", "<f8"),
        *((name, "<f8") for name in QUANTILES),  # ms; 0 where no request was timed
        ("histogram", "<u4", (len(EDGES_MS) + 1,)),  # timed requests that took at most each edge
        *((name, "<i8") for name in LATER_COUNTS),
        (
            "error_callers",
            "<i8",
        ),  # exact below `MAX_CALLERS`, then an estimate within a few per cent
    ]
)
COUNTED = np.dtype([("index", "<i2"), ("count", "<u4")])
CALLER = np.dtype("<u4")
MAX_CALLERS = 256

_LOWEST = MAPPING.key(SHORTEST_MS)
# Latency of each sketch index, from `_LOWEST` on.
_VALUES_MS = np.array(
    [MAPPING.value(index) for index in range(_LOWEST, MAPPING.key(LONGEST_MS) + 1)], dtype="f8"
)
_BUCKETS = np.searchsorted(np.array(EDGES_MS), _VALUES_MS)


@dataclass(frozen=True)
class Columns:
    """Windows in rows: row i has `facts[i]`, `lengths[i]` records of `sketches` and `caller_lengths[i]` of `callers`.

    `sketches` and `callers` hold the records of all rows without gaps.
    """

    facts: Records
    sketches: Records
    lengths: Whole
    callers: NDArray[np.uint32]
    caller_lengths: Whole

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.facts)

    def part(self, first: int, last: int) -> "Columns":
        """The rows from `first` to the one before `last`."""
        rows = slice(first, last)
        records, callers = (
            slice(lengths[:first].sum(), lengths[:last].sum())
            for lengths in (self.lengths, self.caller_lengths)
        )
        return Columns(
            self.facts[rows],
            self.sketches[records],
            self.lengths[rows],
            self.callers[callers],
            self.caller_lengths[rows],
        )

    def encoded(self) -> list[bytes]:
        """The stored bytes of each window."""
        ends, lasts = np.cumsum(self.lengths), np.cumsum(self.caller_lengths)
        rows = zip(
            self.facts, ends - self.lengths, ends, lasts - self.caller_lengths, lasts, strict=True
        )
        return [
            fact.tobytes() + self.sketches[low:high].tobytes() + self.callers[first:last].tobytes()
            for fact, low, high, first, last in rows
        ]


def from_stored(stored: Sequence[bytes]) -> Columns:
    """The inverse of `Columns.encoded`."""
    facts = np.frombuffer(b"".join([window[: FACTS.itemsize] for window in stored]), FACTS)
    # The number of callers may be an estimate, but no more than `MAX_CALLERS` are stored.
    stored_callers = np.minimum(facts["error_callers"], MAX_CALLERS)
    sizes = np.fromiter(map(len, stored), np.int64, len(stored))
    ends = sizes - stored_callers * CALLER.itemsize
    parts = list(zip(stored, ends.tolist(), strict=True))
    return Columns(
        facts,
        np.frombuffer(b"".join([window[FACTS.itemsize : end] for window, end in parts]), COUNTED),
        (ends - FACTS.itemsize) // COUNTED.itemsize,
        np.frombuffer(b"".join([window[end:] for window, end in parts]), CALLER),
        stored_callers,
    )


def from_windows(windows: Sequence[MetricWindow]) -> Columns:
    """The counts of each window; percentiles and histogram are still zero (see `grouped`)."""
    facts = np.zeros(len(windows), FACTS)
    for row, window in zip(facts, windows, strict=True):
        row["requests"], row["errors"] = window.request_count, window.error_count
        row["empty"], row["latency_sum_ms"] = window.empty_count, window.latency_sum_ms
        row["input"], row["output"] = window.input_tokens, window.output_tokens
        row["cancelled"], row["refused"] = window.cancelled_count, window.refused_count
    pairs = [pair for window in windows for pair in sorted(window.latencies.items())]
    lengths = np.fromiter((len(window.latencies) for window in windows), np.int64, len(windows))
    callers = [caller for window in windows for caller in window.error_callers]
    caller_counts = np.fromiter(
        (len(window.error_callers) for window in windows), np.int64, len(windows)
    )
    return Columns(
        facts, np.array(pairs, COUNTED), lengths, np.array(callers, CALLER), caller_counts
    )


def joined(*parts: Columns) -> Columns:
    """The rows of all parts, one part after the other."""
    return Columns(
        np.concatenate([part.facts for part in parts]),
        np.concatenate([part.sketches for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.callers for part in parts]),
        np.concatenate([part.caller_lengths for part in parts]),
    )


def grouped(columns: Columns, groups: Whole) -> tuple[Whole, Columns]:
    """Merge the windows of each group into one, with percentiles and histogram.

    `groups` holds the group of each row. Returns the distinct groups in ascending order, and their windows.
    """
    distinct, into = np.unique(groups, return_inverse=True)
    facts = np.zeros(len(distinct), FACTS)
    for name in SUMS:
        total: Any = np.zeros(len(distinct), FACTS[name])
        np.add.at(total, into, columns.facts[name])
        facts[name] = total

    # Group and caller's hash in one number, so that one call finds the distinct pairs in order.
    keys = np.unique((np.repeat(into, columns.caller_lengths) << 32) + columns.callers)
    rows, hashes = keys >> 32, keys & 0xFFFF_FFFF
    callers = np.bincount(rows, minlength=len(facts))
    firsts = np.cumsum(callers) - callers
    is_kept = np.arange(len(rows)) - firsts[rows] < MAX_CALLERS
    facts["error_callers"] = callers
    # Hashes are uniform over 32 bits, so the k-th smallest of n lies near k / n of the range.
    many = np.flatnonzero(callers >= MAX_CALLERS)
    highest = hashes[firsts[many] + MAX_CALLERS - 1]
    estimated = ((MAX_CALLERS - 1) * 2.0**32 / (highest + 1)).astype(np.int64)
    facts["error_callers"][many] = np.clip(estimated, MAX_CALLERS, facts["errors"][many])
    kept = hashes[is_kept].astype(CALLER), np.minimum(callers, MAX_CALLERS)
    return distinct, Columns(facts, *_merge_latencies(facts, into, columns), *kept)


def _merge_latencies(facts: Records, into: Whole, columns: Columns) -> tuple[Records, Whole]:
    """The sketches of each group, and how long they are; fills in percentiles and histogram."""
    # Row and index in one number, so that counts with equal keys are added up in one call.
    keys = np.repeat(into, columns.lengths) << 16
    keys += columns.sketches["index"].astype(np.int64) - _LOWEST
    count = columns.sketches["count"]
    # Sketches of a single window each are sorted already, and sorting is the slow part.
    if not np.all(keys[1:] > keys[:-1]):
        order = np.argsort(keys, kind="stable")
        keys, count = keys[order], count[order]
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    count = np.add.reduceat(count.astype(np.int64), firsts) if len(firsts) else firsts
    rows, place = keys[firsts] >> 16, keys[firsts] & 0xFFFF

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

    sketches = np.empty(len(rows), COUNTED)
    sketches["index"], sketches["count"] = place + _LOWEST, count
    return sketches, np.bincount(rows, minlength=len(facts))


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
    return (facts["requests"] > 0) | (facts["cancelled"] > 0) | (facts["refused"] > 0)
