"""Many windows at once, as columns: merging, percentiles, histograms, and the bytes that are stored. Pure.

43,200 minutes of a month are merged in a tenth of a second, so every number of an answer comes from here. A window's
bytes are one record of `FACTS`, then its sketch (records of `COUNTED`, rising by index), then the numbers of up to
`MOST_CALLERS` callers who met errors: the smallest ones, so that windows merge and more callers than these can be
estimated, by how close they lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuneship.metrics.windows import LONGEST_MS, MAPPING, SHORTEST_MS, MetricWindow

Records = NDArray[np.void]
Whole = NDArray[np.int64]
Numbers = NDArray[np.float64]

# Upper edges of the published histogram, 1 ms to 131,072 ms; one more slot counts everything.
EDGES_MS: tuple[float, ...] = tuple(float(2**power) for power in range(18))
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
COUNTS = ("requests", "errors", "empty", "input", "output")
# `uncounted`: requests from before the other two and the callers were counted (schema 0007).
LATER_COUNTS = ("cancelled", "refused", "uncounted")
SUMS = (*COUNTS, "latency_sum_ms", *LATER_COUNTS)
FACTS = np.dtype(
    [
        *((name, "<i8") for name in COUNTS),
        ("latency_sum_ms", "<f8"),
        *((name, "<f8") for name in QUANTILES),  # ms; 0 without a successful request
        ("histogram", "<u4", (len(EDGES_MS) + 1,)),  # requests that took at most each edge
        *((name, "<i8") for name in LATER_COUNTS),
        ("error_callers", "<i8"),  # exact below `MOST_CALLERS`, then within a few per cent
    ]
)
COUNTED = np.dtype([("index", "<i2"), ("count", "<u4")])
CALLER = np.dtype("<u4")
MOST_CALLERS = 256

_LOWEST = MAPPING.key(SHORTEST_MS)
# Milliseconds of each sketch index, from `_LOWEST` on.
_VALUES = np.array(
    [MAPPING.value(index) for index in range(_LOWEST, MAPPING.key(LONGEST_MS) + 1)], dtype="f8"
)
_SLOTS = np.searchsorted(np.array(EDGES_MS), _VALUES)


@dataclass(frozen=True)
class Columns:
    """Windows in rows: `facts[i]`, and `lengths[i]` records of `sketches`, which follow one another.

    Likewise `caller_lengths[i]` numbers of `callers`.
    """

    facts: Records
    sketches: Records
    lengths: Whole
    callers: NDArray[np.uint32]
    caller_lengths: Whole

    def __len__(self) -> int:
        """How many windows."""
        return len(self.facts)

    def encoded(self) -> list[bytes]:
        """The stored form of each window."""
        ends, lasts = np.cumsum(self.lengths), np.cumsum(self.caller_lengths)
        rows = zip(
            self.facts, ends - self.lengths, ends, lasts - self.caller_lengths, lasts, strict=True
        )
        return [
            fact.tobytes() + self.sketches[low:high].tobytes() + self.callers[first:last].tobytes()
            for fact, low, high, first, last in rows
        ]


def from_stored(stored: Sequence[bytes]) -> Columns:
    """Read what `encoded` wrote."""
    facts = np.frombuffer(b"".join([one[: FACTS.itemsize] for one in stored]), FACTS)
    kept = np.minimum(facts["error_callers"], MOST_CALLERS)
    sizes = np.fromiter(map(len, stored), np.int64, len(stored))
    ends = sizes - kept * CALLER.itemsize
    parts = list(zip(stored, ends.tolist(), strict=True))
    return Columns(
        facts,
        np.frombuffer(b"".join([one[FACTS.itemsize : end] for one, end in parts]), COUNTED),
        (ends - FACTS.itemsize) // COUNTED.itemsize,
        np.frombuffer(b"".join([one[end:] for one, end in parts]), CALLER),
        kept,
    )


def from_windows(windows: Sequence[MetricWindow]) -> Columns:
    """What was counted, before anything is derived from it."""
    facts = np.zeros(len(windows), FACTS)
    for row, window in zip(facts, windows, strict=True):
        row["requests"], row["errors"] = window.request_count, window.error_count
        row["empty"], row["latency_sum_ms"] = window.empty_count, window.latency_sum_ms
        row["input"], row["output"] = window.input_tokens, window.output_tokens
        row["cancelled"], row["refused"] = window.cancelled_count, window.refused_count
    pairs = [pair for window in windows for pair in sorted(window.latencies.items())]
    lengths = np.fromiter((len(window.latencies) for window in windows), np.int64, len(windows))
    callers = [number for window in windows for number in window.error_callers]
    met = np.fromiter((len(window.error_callers) for window in windows), np.int64, len(windows))
    return Columns(facts, np.array(pairs, COUNTED), lengths, np.array(callers, CALLER), met)


def joined(*parts: Columns) -> Columns:
    """The rows of all parts, one part after the other."""
    return Columns(
        np.concatenate([part.facts for part in parts]),
        np.concatenate([part.sketches for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.callers for part in parts]),
        np.concatenate([part.caller_lengths for part in parts]),
    )


def grouped(columns: Columns, places: Whole) -> tuple[Whole, Columns]:
    """One window for each distinct place; answers the places in rising order, and their windows."""
    found, into = np.unique(places, return_inverse=True)
    facts = np.zeros(len(found), FACTS)
    for name in SUMS:
        total: Any = np.zeros(len(found), FACTS[name])
        np.add.at(total, into, columns.facts[name])
        facts[name] = total
    rows = np.repeat(into, columns.lengths)
    rows, index, count = _summed(rows, columns.sketches["index"], columns.sketches["count"])
    sketches = np.empty(len(rows), COUNTED)
    sketches["index"], sketches["count"] = index, count
    lengths = np.bincount(rows, minlength=len(found))
    _derive(facts, rows, index, count)
    return found, Columns(facts, sketches, lengths, *_callers(facts, into, columns))


def _callers(facts: Records, into: Whole, columns: Columns) -> tuple[NDArray[np.uint32], Whole]:
    """The smallest numbers of callers of each row, and how many; fills in how many callers there were."""
    keys = np.unique((np.repeat(into, columns.caller_lengths) << 32) + columns.callers)
    rows, numbers = keys >> 32, keys & 0xFFFF_FFFF
    distinct = np.bincount(rows, minlength=len(facts))
    firsts = np.cumsum(distinct) - distinct
    is_kept = np.arange(len(rows)) - firsts[rows] < MOST_CALLERS
    facts["error_callers"] = distinct
    many = np.flatnonzero(distinct >= MOST_CALLERS)
    highest = numbers[firsts[many] + MOST_CALLERS - 1]
    estimated = ((MOST_CALLERS - 1) * 2.0**32 / (highest + 1)).astype(np.int64)
    facts["error_callers"][many] = np.clip(estimated, MOST_CALLERS, facts["errors"][many])
    return numbers[is_kept].astype(CALLER), np.minimum(distinct, MOST_CALLERS)


def is_some(facts: Records) -> NDArray[np.bool_]:
    """Which records count anything at all."""
    return (facts["requests"] > 0) | (facts["cancelled"] > 0) | (facts["refused"] > 0)


def _summed(
    rows: Whole, index: NDArray[np.int16], count: NDArray[np.uint32]
) -> tuple[Whole, Whole, Whole]:
    """Counts of the same row and index added up, sorted by both."""
    keys = (rows << 16) + (index.astype(np.int64) - _LOWEST)
    if not np.all(keys[1:] > keys[:-1]):
        order = np.argsort(keys, kind="stable")
        keys, count = keys[order], count[order]
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    totals = np.add.reduceat(count.astype(np.int64), firsts) if len(firsts) else firsts
    keys = keys[firsts]
    return keys >> 16, (keys & 0xFFFF) + _LOWEST, totals


def _derive(facts: Records, rows: Whole, index: Whole, count: Whole) -> None:
    """Fill in percentiles and histogram from sketches sorted by row and index."""
    slots = len(EDGES_MS) + 1
    cells = np.bincount(
        rows * slots + _SLOTS[index - _LOWEST], weights=count, minlength=len(facts) * slots
    )
    facts["histogram"] = cells.reshape(len(facts), slots).cumsum(axis=1)
    reached = np.cumsum(count)
    own = facts["requests"] - facts["errors"]
    some = own > 0
    before = (np.cumsum(own) - own)[some]
    for name, quantile in QUANTILES.items():
        rank = np.floor(quantile * (own[some] - 1)).astype(np.int64)
        facts[name][some] = _VALUES[index[np.searchsorted(reached, before + rank + 1)] - _LOWEST]
