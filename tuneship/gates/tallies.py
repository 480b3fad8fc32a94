"""Counts "x of n" for each gate and both arms, bucket by bucket, and where its terms start.

Recomputed from the start at every look. Knows no verdict. Next: `evidence.py` weighs the counts, `canary.py` decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tuneship.gates.evidence import LOOKS_PER_TERM, BucketCounts
from tuneship.gates.gate_types import Gate
from tuneship.gates.kinds import GATES, Published
from tuneship.gates.record import (
    ApprovalAsked,
    Mark,
    Phase,
    Probed,
    RolloutRecord,
    SplitConfirmed,
)
from tuneship.gates.series import ArmTraffic, Bucket, RolloutSeries, Unusable, first_after

LATENCY_GATES = ("slow", "very_slow")


@dataclass(frozen=True)
class Tally:
    """Counts of one gate in time order, as far as the present phase tests them."""

    # Counts since the rollout began, or since the candidate got all traffic.
    counts: tuple[BucketCounts, ...]
    # The same counts without the latency of warm-up looks.
    heard: tuple[BucketCounts, ...]
    # The same counts with one caller's failures at the candidate in one bucket as one failure.
    distinct: tuple[BucketCounts, ...]
    # Index of the first bucket of each term of this phase.
    starts: tuple[int, ...]

    # Counts of both deployments from before the candidate got all traffic; else None.
    live: tuple[BucketCounts, ...] | None = None

    @property
    def warning(self) -> tuple[BucketCounts, ...]:
        """The counts for the early warning, which has no defence of its own against bursts and cold starts."""
        return self.distinct if self.heard is self.counts else self.heard


@dataclass(frozen=True)
class Span:
    """Buckets of the rollout: those before the bake, where a live baseline answers, and those of the bake."""

    compared: tuple[Bucket, ...]
    baked: tuple[Bucket, ...]

    @property
    def all(self) -> tuple[Bucket, ...]:
        return self.compared + self.baked


def span(series: RolloutSeries, record: RolloutRecord) -> Span:
    """Cut the series at the first split and at the 100 % split."""
    marks = record.step_marks()
    buckets = series.buckets
    first = first_after(buckets, next(iter(marks.values())).at) if marks else len(buckets)
    last = first_after(buckets, marks[100].at) if 100 in marks else len(buckets)
    return Span(buckets[first:last], buckets[last:])


def token_ratio(buckets: Sequence[Bucket]) -> float | None:
    """Output tokens per request, candidate over baseline, where both had requests; None while unknown."""
    # The same minutes of both: what callers ask for changes over the day.
    both = [b for b in buckets if b.baseline.requests and b.candidate.requests]
    candidate, baseline = _tokens([b.candidate for b in both]), _tokens([b.baseline for b in both])
    if candidate is None or not baseline:
        return None
    return candidate / baseline


def _tokens(traffic: Sequence[ArmTraffic]) -> float | None:
    known = [arm for arm in traffic if arm.output_tokens is not None]
    requests = sum(arm.requests for arm in known)
    return sum(arm.output_tokens or 0.0 for arm in known) / requests if requests else None


def tally(
    gate: Gate,
    record: RolloutRecord,
    measured: Published,
    *,
    warm: frozenset[datetime] = frozenset(),
    by_caller: bool = False,
) -> Tally:
    """Count for one gate. Raises `Unusable` where its counts are gone.

    `measured.buckets` are all of the rollout's. `warm`: ends of those in which latency is not weighed. `by_caller`:
    a caller's repeated failures are counted once.
    """
    if gate.source == "probes":
        return _probe_tally(gate, record)
    kind = GATES[gate.name]
    if kind.count is None:
        raise Unusable(f"the service publishes no counts for the gate {gate.name}")
    whole = span(measured.series, record)
    all_counts = tuple(kind.count(measured))
    # At 100 % only what came since then can be tested: before, the candidate had less load.
    cut = len(whole.compared) if record.weight == 100 else 0
    buckets = whole.all[cut:]
    counts = all_counts[cut:]
    heard = distinct = counts
    if warm and gate.name in LATENCY_GATES:
        heard = tuple(
            BucketCounts(0, 0) if bucket.end in warm else count
            for bucket, count in zip(buckets, counts, strict=True)
        )
    if by_caller and gate.name == "error":
        distinct = tuple(map(one_per_caller, buckets, counts))
    starts = tuple(first_after(buckets, mark.at) for mark in term_marks(record))
    live = all_counts[:cut] if record.weight == 100 else None
    return Tally(counts, heard, distinct, starts, live)


def one_per_caller(bucket: Bucket, counts: BucketCounts) -> BucketCounts:
    """Count one caller's failures at the candidate as one failure, where callers are counted."""
    callers = bucket.candidate.error_callers
    if callers is None or callers >= counts.x_c:
        return counts
    # The repeats are left out of the requests, too. Only the candidate's: counting fewer failures of
    # the baseline would make the candidate look worse.
    return counts._replace(n_c=counts.n_c - counts.x_c + callers, x_c=callers)


def warm_up(buckets: Sequence[Bucket], record: RolloutRecord, looks: int) -> frozenset[datetime]:
    """Ends of the buckets of the first `looks` looks with new data after each increase, this one included."""
    if not looks or not buckets:
        return frozenset()
    # Looks with new data are counted, and not minutes, so that a slow server gets its warm-up as well.
    marks = list(record.step_marks().items())
    ends = [mark.at for _, mark in marks[1:]] + [None]
    warm: set[datetime] = set()
    for (weight, mark), end in zip(marks, ends, strict=True):
        brought = [look for look in record.looks if look.weight == weight and look.brought_data]
        last = brought[looks - 1].horizon if len(brought) >= looks else end
        until = first_after(buckets, last) if last else len(buckets)
        warm.update(bucket.end for bucket in buckets[first_after(buckets, mark.at) : until])
    return frozenset(warm)


def _probe_tally(gate: Gate, record: RolloutRecord) -> Tally:
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
    return Tally(now, now, now, tuple(max(0, start - cut) for start in starts), live)


def _bad_answers(bad: Mapping[str, int], gate: Gate, requests: int) -> int:
    """Bad answers of one look. Raises `Unusable` where the driver did not check for this fault."""
    if requests and gate.name not in bad:
        raise Unusable(f"the traffic driver did not count for the gate {gate.name}")
    return bad.get(gate.name, 0)


def term_marks(record: RolloutRecord) -> list[Mark]:
    """Moments at which the terms of the present phase start: each compared step; in a wait or bake every fifth look."""
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
