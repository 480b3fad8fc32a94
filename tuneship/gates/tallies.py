"""Each gate's "x of n" for both arms, bucket by bucket, from the series or the driver, and where its terms start.

Recomputed from the start at every look. Knows no verdict. Next: `evidence.py` weighs the counts, `canary.py` decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tuneship.gates.evidence import LOOKS_PER_TERM, Counts
from tuneship.gates.latency import has_latency, slow_requests
from tuneship.gates.record import (
    ApprovalAsked,
    Fact,
    Gate,
    LatencyLimits,
    Mark,
    Phase,
    Probed,
    Record,
    SplitConfirmed,
)
from tuneship.gates.series import Bucket, Series, Traffic, Unusable, first_after

LATENCY_GATES = ("slow", "very_slow")


@dataclass(frozen=True)
class Tally:
    """Counts of one gate since the roll-out began, in time order. `starts`: first index of each term of this phase."""

    compared: tuple[Counts, ...]
    baked: tuple[Counts, ...]
    starts: tuple[int, ...]
    """Into `compared`, during the bake into `baked`."""


@dataclass(frozen=True)
class Span:
    """Buckets of the roll-out: those before the bake, where a live baseline answers, and those of the bake."""

    compared: tuple[Bucket, ...]
    baked: tuple[Bucket, ...]

    @property
    def all(self) -> tuple[Bucket, ...]:
        return self.compared + self.baked


def span(series: Series, record: Record) -> Span:
    """Cut the series at the first split and at the 100 % split."""
    marks = record.step_marks()
    buckets = series.buckets
    first = first_after(buckets, next(iter(marks.values())).at) if marks else len(buckets)
    last = first_after(buckets, marks[100].at) if 100 in marks else len(buckets)
    return Span(buckets[first:last], buckets[last:])


def token_ratio(buckets: Sequence[Bucket]) -> float | None:
    """Output tokens per request, candidate over baseline, where both had requests; None while unknown."""
    both = [b for b in buckets if b.baseline.requests and b.candidate.requests]
    candidate, baseline = _tokens([b.candidate for b in both]), _tokens([b.baseline for b in both])
    if candidate is None or not baseline:
        return None
    return candidate / baseline


def _tokens(traffic: Sequence[Traffic]) -> float | None:
    known = [one for one in traffic if one.output_tokens is not None]
    requests = sum(one.requests for one in known)
    return sum(one.output_tokens or 0.0 for one in known) / requests if requests else None


def tally(
    gate: Gate, series: Series, record: Record, limits: LatencyLimits | None, scale: float
) -> Tally:
    """Counts of one gate. `scale` widens the candidate's latency thresholds. Raises `Unusable`: no source."""
    if gate.source == "probes":
        return _probe_tally(gate, record)
    whole = span(series, record)
    counts = _series_counts(gate.name, series, whole.all, limits, scale)
    cut = len(whole.compared)
    origin = whole.baked if record.phase is Phase.BAKE else whole.compared
    starts = tuple(first_after(origin, mark.at) for mark in term_marks(record))
    return Tally(tuple(counts[:cut]), tuple(counts[cut:]), starts)


def _series_counts(
    name: str, series: Series, buckets: Sequence[Bucket], limits: LatencyLimits | None, scale: float
) -> list[Counts]:
    if name == "error":
        return [
            Counts(b.candidate.requests, b.candidate.errors, b.baseline.requests, b.baseline.errors)
            for b in buckets
        ]
    if name == "empty":
        return [Counts(*_empty(b.candidate), *_empty(b.baseline)) for b in buckets]
    for bucket in buckets:
        for traffic in (bucket.baseline, bucket.candidate):
            if traffic.served > 0 and not has_latency(traffic):
                raise Unusable("answers without their latency")
    if limits is None:
        return [Counts(0, 0) for _ in buckets]
    threshold = limits.slow_ms if name == "slow" else limits.very_slow_ms
    candidate = slow_requests(series, buckets, "candidate", threshold * scale)
    baseline = slow_requests(series, buckets, "baseline", threshold)
    return [
        Counts(b.candidate.served, x_c, b.baseline.served, x_b)
        for b, x_c, x_b in zip(buckets, candidate, baseline, strict=True)
    ]


def _empty(traffic: Traffic) -> tuple[int, int]:
    if traffic.served > 0 and traffic.empty is None:
        raise Unusable("the counts of empty answers are gone")
    if (traffic.empty or 0) > traffic.served:
        raise Unusable("more empty answers than answers")
    return traffic.served, traffic.empty or 0


def _probe_tally(gate: Gate, record: Record) -> Tally:
    probes = [(mark.looks, fact) for fact, mark in record.marked() if isinstance(fact, Probed)]
    baked_from = record.step_marks().get(100, Mark(None, len(record.looks) + 1)).looks
    counts = [
        Counts(
            p.candidate_requests - p.candidate_failed,
            p.candidate_bad.get(gate.name, 0),
            p.baseline_requests - p.baseline_failed,
            p.baseline_bad.get(gate.name, 0),
        )
        for _, p in probes
    ]
    cut = sum(looks < baked_from for looks, _ in probes)
    offset = cut if record.phase is Phase.BAKE else 0
    starts = (sum(looks < mark.looks for looks, _ in probes) for mark in term_marks(record))
    return Tally(
        tuple(counts[:cut]), tuple(counts[cut:]), tuple(max(0, s - offset) for s in starts)
    )


def term_marks(record: Record) -> list[Mark]:
    """Where the terms of the present phase start: each compared step; in a wait or a bake every fifth look."""
    if record.phase is Phase.COMPARE:
        return list(record.step_marks().values())
    began = [mark for fact, mark in record.marked() if _begins(fact, record.phase)]
    looks = [look for look in record.looks if look.phase is record.phase]
    later = looks[LOOKS_PER_TERM - 1 :: LOOKS_PER_TERM]
    return began[:1] + [Mark(look.horizon, look.number) for look in later]


def _begins(fact: Fact, phase: Phase) -> bool:
    if phase is Phase.WAIT:
        return isinstance(fact, ApprovalAsked)
    return isinstance(fact, SplitConfirmed) and fact.candidate_weight == 100
