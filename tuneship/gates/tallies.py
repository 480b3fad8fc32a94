"""Counts "x of n" for each gate and both arms, bucket by bucket, and where its terms start.

Recomputed from the start at every look. Knows no verdict. Next: `evidence.py` weighs the counts, `canary.py` decides.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tuneship.gates.gate_types import Gate, LatencyLimits, UsualHour
from tuneship.gates.kinds import GATES, Measured
from tuneship.gates.latency import (
    ENOUGH_REQUESTS,
    has_latency,
    length_limits,
    limits_from,
    load,
)
from tuneship.gates.metrics.series import ArmTraffic, Bucket, RolloutSeries, Unusable, first_after
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import (
    ApprovalAsked,
    Mark,
    Phase,
    Probed,
    RolloutRecord,
    SplitConfirmed,
)
from tuneship.gates.statistics.cells import cell_of
from tuneship.gates.statistics.evidence import LOOKS_PER_TERM, BucketCounts, Limits
from tuneship.gates.statistics.fold import scan

LATENCY_GATES = ("slow", "very_slow", "typical")
# Where one caller's repeats are counted, by gate.
_CALLERS = {
    "error": "error_callers",
    "abandoned": "cancelled_callers",
    "refused": "refused_callers",
}
# The baseline's newest buckets that say what is slow now.
RECENT_BUCKETS = 10
# Latency is compared while a replica of the candidate carries at most this much more than one of the baseline.
EQUAL_LOAD = 1.25
# Spreads the rounding of estimates evenly over the buckets.
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class Tally:
    """Counts of one gate in time order, as far as the current phase tests them."""

    # Counts since the rollout began, or since the candidate got all traffic.
    counts: tuple[BucketCounts, ...]
    # The same counts with one caller's failures at the candidate in one bucket as one failure.
    distinct: tuple[BucketCounts, ...]
    # Index of the first bucket of each term of this phase.
    starts: tuple[int, ...]
    # The same counts with those of unequal load; only a proof may read them.
    wider: tuple[BucketCounts, ...] | None = None
    # Counts of both deployments from before the candidate got all traffic; else None.
    live: tuple[BucketCounts, ...] | None = None


@dataclass(frozen=True)
class Span:
    """Buckets of the rollout: those before the bake, which have a live baseline, and those of the bake."""

    compared: tuple[Bucket, ...]
    baked: tuple[Bucket, ...]

    @cached_property
    def all(self) -> tuple[Bucket, ...]:
        return self.compared + self.baked


def span(series: RolloutSeries, record: RolloutRecord) -> Span:
    """Cut the series at the first split and at the 100 % split."""
    marks = record.step_marks()
    buckets = series.buckets
    first = first_after(buckets, next(iter(marks.values())).at) if marks else len(buckets)
    last = first_after(buckets, marks[100].at) if 100 in marks else len(buckets)
    return Span(buckets[first:last], buckets[last:])


@dataclass(frozen=True, slots=True)
class _Known:
    """The limits from the buckets so far, and the last bucket in the gates' counts."""

    measured: Measured | None = None
    recent: tuple[ArmTraffic, ...] = ()
    # What the baseline's newest buckets alone set.
    now: LatencyLimits | None = None
    lengths: tuple[float, float] | None = None
    load: float = 0.0
    # Output tokens and requests, of the candidate and of the baseline, in the buckets in which both had
    # some: what callers ask for changes over the day.
    tokens: tuple[float, int, float, int] = (0.0, 0, 0.0, 0)

    @property
    def token_ratio(self) -> float | None:
        """Output tokens per request, candidate over baseline; None while unknown."""
        c_tokens, c_requests, b_tokens, b_requests = self.tokens
        return c_tokens / c_requests / (b_tokens / b_requests) if c_requests and b_tokens else None


def measure(
    series: RolloutSeries, record: RolloutRecord, plan: CanaryPlan
) -> tuple[list[Measured], LatencyLimits | None, float | None]:
    """The rollout's buckets with the limits that were known before each began, those of the next bucket, and the ratio
    of the answers' lengths.

    The series may begin before the rollout: what the baseline served then sets limits.
    """
    marks = record.step_marks()
    weights = [0] * len(series.buckets)
    for weight, mark in marks.items():
        start = first_after(series.buckets, mark.at)
        weights[start:] = [weight] * (len(weights) - start)
    usual = record.begun.usual
    latency, edges = plan.latency_gates, (series.edges_ms["baseline"], series.edges_ms["candidate"])
    per_token = latency is not None and latency.per_output_token
    allows_length = per_token and not (usual.limits and usual.limits.per_token)
    key = ("measured", record.begun.rollout_id, usual, edges, plan.digest())
    items = list(zip(series.buckets, weights, strict=True))
    states = scan(
        key,
        items,
        _Known(),
        lambda known, item: _after(known, item, usual, edges, allows_length, plan),
    )
    first = first_after(series.buckets, next(iter(marks.values())).at) if marks else len(states)
    known = states[-1] if states else _Known()
    latest = _limits(known, record.weight, usual)
    measured = [state.measured for state in states[first:] if state.measured is not None]
    return measured, latest, known.token_ratio


def _after(
    known: _Known,
    item: tuple[Bucket, int],
    usual: UsualHour,
    edges: tuple[tuple[float, ...] | None, tuple[float, ...] | None],
    allows_length: bool,
    plan: CanaryPlan,
) -> _Known:
    bucket, weight = item
    baseline, candidate = bucket.baseline, bucket.candidate
    most = max(known.load, usual.load, load(baseline))
    # A server that publishes no lengths allows for them by the ratio of the buckets before.
    allowed = 0.0
    if allows_length and (ratio := known.token_ratio):
        # Shorter answers earn no stricter limits, and beyond three times the length more time is no excuse.
        allowed = cell_of(min(max(ratio, 1.0), 3.0))
    of_hour = None
    if usual.too_short is not None and usual.too_long is not None:
        of_hour = usual.too_short, usual.too_long
    number = len(known.recent) if known.measured is None else known.measured.dither + _GOLDEN
    measured = Measured(
        bucket,
        edges,
        _limits(known, weight, usual),
        of_hour or known.lengths,
        allowed,
        number % 1.0,
        not most or load(candidate) <= EQUAL_LOAD * most,
    )
    recent, now = known.recent, known.now
    if baseline.served and has_latency(baseline):
        recent = (*recent, baseline)
        # With little traffic, as many as are needed for limits.
        served, first = sum(arm.served for arm in recent), 0
        while len(recent) - first > RECENT_BUCKETS:
            served -= recent[first].served
            if served < ENOUGH_REQUESTS:
                break
            first += 1
        recent = recent[first:]
        now = _limits_now(recent, usual, edges[0])
    lengths = known.lengths
    if lengths is None and of_hour is None:
        lengths = length_limits(recent, plan)
    tokens = known.tokens
    both = baseline.requests and candidate.requests
    if both and baseline.output_tokens is not None and candidate.output_tokens is not None:
        c_tokens, c_requests, b_tokens, b_requests = tokens
        tokens = (
            c_tokens + candidate.output_tokens,
            c_requests + candidate.requests,
            b_tokens + baseline.output_tokens,
            b_requests + baseline.requests,
        )
    return _Known(measured, recent, now, lengths, max(known.load, load(baseline)), tokens)


def _limits_now(
    recent: Sequence[ArmTraffic], usual: UsualHour, edges: tuple[float, ...] | None
) -> LatencyLimits | None:
    newest = recent[-RECENT_BUCKETS:]
    if usual.limits is None and sum(arm.served for arm in newest) < ENOUGH_REQUESTS:
        newest = recent
    per_token = usual.limits is not None and usual.limits.per_token
    try:
        return limits_from(newest, edges, per_token=per_token)
    except (ValueError, Unusable):
        return None


def _limits(known: _Known, weight: int, usual: UsualHour) -> LatencyLimits | None:
    """The limits of the next bucket: from the baseline's newest buckets, or from the hour before the start."""
    now, hour = known.now, usual.limits
    if now is None or hour is None:
        return now or hour
    if weight <= 50:
        return now
    # The baseline carried the whole load then, and carries less now.
    return LatencyLimits(
        max(now.typical_ms, hour.typical_ms),
        max(now.slow_ms, hour.slow_ms),
        max(now.very_slow_ms, hour.very_slow_ms),
        now.requests,
        hour.per_token,
    )


def count(
    gates: Sequence[tuple[str, Limits]], measured: Sequence[Measured], key: Hashable
) -> list[tuple[BucketCounts, ...]]:
    """Counts of each gate in each bucket, in total and by caller. Raises `Unusable` if they are no longer stored."""

    def of(_: tuple[BucketCounts, ...], one: Measured) -> tuple[BucketCounts, ...]:
        row = [kind.count(one, limits) for kind, limits in kinds if kind.count is not None]
        callers = [
            getattr(one.bucket.candidate, _CALLERS[kind.name]) if kind.name in _CALLERS else None
            for kind, _ in kinds
        ]
        return *row, *map(one_per_caller, callers, row)

    kinds = [(GATES[name], limits) for name, limits in gates]
    return scan(("counts", key, tuple(gates)), measured, (), of)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The first bucket of this phase, where its terms begin, and the buckets of unequal load."""

    first: int
    starts: tuple[int, ...]
    unequal: frozenset[int]


def tally(
    gate: Gate,
    record: RolloutRecord,
    counted: Sequence[BucketCounts],
    by_caller: Sequence[BucketCounts],
    bounds: Bounds,
) -> Tally:
    """Tally one gate."""
    first = bounds.first
    counts = tuple(counted[first:])
    distinct, wider = counts, None
    if gate.name in LATENCY_GATES and bounds.unequal:
        wider = counts
        counts = distinct = tuple(
            BucketCounts(0, 0) if i in bounds.unequal else c
            for i, c in enumerate(counts, start=first)
        )
    elif gate.name in _CALLERS:
        distinct = tuple(by_caller[first:])
        # Weighed once where no caller repeats.
        distinct = counts if distinct == counts else distinct
    live = tuple(counted[:first]) if record.weight == 100 else None
    return Tally(counts, distinct, bounds.starts, wider, live)


def one_per_caller(callers: int | None, counts: BucketCounts) -> BucketCounts:
    """Count one caller's failures at the candidate as one failure, where callers are counted."""
    if callers is None or callers >= counts.x_c:
        return counts
    # The repeats are left out of the requests, too. Only the candidate's: counting fewer failures of
    # the baseline would make the candidate look worse.
    return counts._replace(n_c=counts.n_c - counts.x_c + callers, x_c=callers)


def probe_tally(gate: Gate, record: RolloutRecord) -> Tally:
    probes = [(mark.looks, fact) for fact, mark in record.marked() if isinstance(fact, Probed)]
    # Probes carry no time, so they are placed by the number of looks taken before them.
    baked_from = record.step_marks().get(100, Mark(None, len(record.looks) + 1)).looks
    # A request that failed has no answer that could be bad.
    counts = [
        BucketCounts(
            p.candidate_requests - p.candidate_failed,
            _bad_answers(p.candidate_bad, gate, p.candidate_requests),
            p.baseline_requests - p.baseline_failed,
            _bad_answers(p.baseline_bad, gate, p.baseline_requests),
        )
        for _, p in probes
    ]
    is_last = record.weight == 100
    cut = sum(looks < baked_from for looks, _ in probes) if is_last else 0
    starts = (sum(looks < mark.looks for looks, _ in probes) for mark in term_marks(record))
    now = tuple(counts[cut:])
    live = tuple(counts[:cut]) if is_last else None
    return Tally(now, now, tuple(max(0, start - cut) for start in starts), None, live)


def _bad_answers(bad: Mapping[str, int], gate: Gate, requests: int) -> int:
    """Bad answers of one look. Raises `Unusable` where the driver did not check for this fault."""
    if requests and gate.name not in bad:
        raise Unusable(f"the traffic driver did not count for the gate {gate.name}")
    return bad.get(gate.name, 0)


def term_marks(record: RolloutRecord) -> list[Mark]:
    """Start times of the terms of the current phase: each compared step; in a wait or bake every fifth look."""
    phase = record.phase
    if phase is Phase.COMPARE:
        return list(record.step_marks().values())
    # A wait begins when a person is asked, a bake when its weight is first confirmed.
    if phase is Phase.WAIT:
        began = [mark for fact, mark in record.marked() if isinstance(fact, ApprovalAsked)]
    else:
        began = [
            mark
            for fact, mark in record.marked()
            if isinstance(fact, SplitConfirmed) and fact.candidate_weight == record.weight
        ]
    looks = [look for look in record.looks if look.phase is phase]
    later = looks[LOOKS_PER_TERM - 1 :: LOOKS_PER_TERM]
    return began[:1] + [Mark(look.horizon, look.number) for look in later]
