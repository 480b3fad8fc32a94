"""Gathers the facts of one look for the rules: the rollout's state, the gates' readings, the soundness of the data.

Pure and recomputed from the start at every look. Next: `rules.py` holds the rules.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from itertools import pairwise, takewhile, zip_longest

from tuneship.gates import readings, tallies
from tuneship.gates.formula import check_formula
from tuneship.gates.gate_types import GateReading, LatencyLimits, ThresholdReading
from tuneship.gates.kinds import Measured
from tuneship.gates.metrics.series import ARMS, Arm, Bucket, RolloutSeries, Unusable, first_after
from tuneship.gates.plan import FULL_LOOK_REQUESTS, CanaryPlan
from tuneship.gates.record import Look, Mark, Phase, Probed, RolloutRecord
from tuneship.gates.split_check import LOG_MISMATCH, drawn_requests, log_e_missing
from tuneship.gates.statistics.evidence import PROOF_BUCKETS, BucketCounts
from tuneship.gates.thresholds import read_thresholds

# Of fewer requests, half may fail by chance.
BREAKER_REQUESTS, BREAKER_SHARE = 20, 0.5
# The newest buckets say whether a baseline is healthy now; an incident of an hour ago does not.
HEALTH_BUCKETS, HEALTH_REQUESTS = 5, 30
# A candidate that should have had this many and has none is not just short of luck (e^-20).
MIN_EXPECTED_REQUESTS = 20
# An increase by less than this leaves caches and replicas as warm as they were.
LARGE_INCREASE = 1.25
# So many buckets without a request, where the weight makes so many likely, are lost counts.
LOST_BUCKETS, LOST_REQUESTS = 2, 10
# Fewer of the baseline's requests say nothing about an incident.
OBJECTIVE_REQUESTS = 20
# Half of the traffic by fewer callers is no sample.
FEW_CALLERS = 20
# A request is hanging when it is older than 10 s and than 5 x the very slow limit: whatever becomes of
# it, it is a slow one. Where a server's ages have no upper end, a day is taken for it.
HANGING_MS, HANGING_LIMITS, _DAY_MS = 10_000.0, 5.0, 86_400_000.0


@dataclass(frozen=True)
class DeploymentState:
    """A deployment as just read: its `status` ("missing" for a 404, None where the call failed) and its replicas."""

    status: str | None
    replicas: int | None = None


@dataclass(frozen=True)
class States:
    """Both deployments as just read, and whether a person has paused the rollout."""

    baseline: DeploymentState
    candidate: DeploymentState
    is_paused: bool = False


@dataclass(frozen=True)
class View:
    """Everything that the rules of one look read."""

    plan: CanaryPlan
    record: RolloutRecord
    series: RolloutSeries | None
    missing: str | None
    standing: bool
    baseline: DeploymentState
    candidate: DeploymentState
    gates: tuple[GateReading, ...]
    # The rollout's buckets as the gates count them, and the latency limits of the next one.
    measured: Sequence[Measured]
    limits: LatencyLimits | None
    tokens: float | None
    # Requests that have been open for too long, by the bucket of their arrival, the newest first.
    hanging: Mapping[Arm, tuple[int, ...]]
    # A person has paused the rollout.
    is_paused: bool
    # A look of 26.12.0 is decided again, whose looks counted by the candidate's requests alone.
    is_of_first_release: bool

    @cached_property
    def phase(self) -> Phase:
        return self.record.phase

    @cached_property
    def weight(self) -> int:
        return self.record.weight

    @cached_property
    def next_weight(self) -> int | None:
        step = next((step for step in self.plan.known_steps if step > self.weight), None)
        # The bake's weight takes the place of 100 % once; from there on, 100 % is the next.
        bake = self.plan.bake_weight
        return bake if step == 100 and bake is not None and bake > self.weight else step

    @cached_property
    def span(self) -> tallies.Span:
        if self.series is None:
            return tallies.Span((), ())
        return tallies.span(self.series, self.record)

    @cached_property
    def step_buckets(self) -> Sequence[Bucket]:
        """Buckets that ended since the present weight was confirmed."""
        if self.series is None:
            return ()
        return self.span.all[first_after(self.span.all, self.record.step_marks()[self.weight].at) :]

    @cached_property
    def new_buckets(self) -> Sequence[Bucket]:
        """The rollout's buckets that no earlier look saw."""
        last = self.record.looks[-1].horizon if self.record.looks else None
        return self.span.all[first_after(self.span.all, last) :]

    @cached_property
    def is_settled(self) -> bool:
        """Whether enough looks have passed since the last large increase to rule out a cold start."""
        marks = list(self.record.step_marks().items())
        started = 0
        for (before, _), (weight, mark) in pairwise([(0, Mark(None, 0)), *marks]):
            if weight >= LARGE_INCREASE * before:
                started = mark.looks
        looks = [look for look in self.record.looks if look.number > started and look.brought_data]
        return len(looks) + self.brought_data >= self.plan.warmup_looks

    @cached_property
    def looks_used(self) -> tuple[float, float]:
        """Looks of this phase that count towards the maxima: at this step and at all; little traffic counts in part."""
        at_step = at_all = 0.0
        seen: dict[int, int] = {}
        resumed = self.record.resumed_after()
        now = (self.phase, self.weight, self.step_traffic, self.step_requests, self.brought_data)
        looks = [
            (look.phase, look.weight, look.step_traffic, look.step_requests, look.brought_data)
            for look in self.record.looks
        ]
        for number, (phase, weight, traffic, answered, brought) in enumerate([*looks, now]):
            requests = answered if traffic is None else traffic
            new = requests - seen.get(weight, 0)
            seen[weight] = max(requests, seen.get(weight, 0))
            if phase is self.phase and brought and number >= resumed:
                used = min(1.0, max(new, 0) / FULL_LOOK_REQUESTS)
                at_all += used
                at_step += used if weight == self.weight else 0.0
        return at_step, at_all

    @cached_property
    def waited(self) -> timedelta:
        """How long the rollout has been at this step."""
        began = self.record.step_marks()[self.weight].at
        if self.series is None or began is None:
            return timedelta()
        resumed = self.record.resumed_after()
        before = self.record.looks[resumed - 1].at if resumed else None
        return self.series.at - max(began, before or began)

    @cached_property
    def thresholds(self) -> tuple[ThresholdReading, ...]:
        if self.series is None:
            return ()
        return read_thresholds(self.plan.thresholds, self.series, self.step_buckets)

    @cached_property
    def above_thresholds(self) -> tuple[ThresholdReading, ...]:
        return tuple(one for one in self.thresholds if one.is_above)

    @cached_property
    def step_requests(self) -> int:
        return sum(bucket.candidate.requests for bucket in self.step_buckets)

    @cached_property
    def step_traffic(self) -> int | None:
        """The candidate's requests at this step, or the number expected from the baseline's.

        So a candidate whose requests nobody counts waits no longer than one whose requests are counted.
        """
        if self.is_of_first_release:
            return None
        if self.weight >= 100:
            return self.step_requests
        others = sum(bucket.baseline.requests for bucket in self.step_buckets)
        return max(self.step_requests, others * self.weight // (100 - self.weight))

    @cached_property
    def step_looks(self) -> list[Look]:
        """Earlier looks at this weight."""
        return [look for look in self.record.looks if look.weight == self.weight]

    @cached_property
    def brought_data(self) -> bool:
        # A resumed run may have read less than the one before it.
        seen = max((look.step_buckets for look in self.step_looks), default=0)
        return len(self.step_buckets) > seen

    @cached_property
    def is_missing(self) -> bool:
        return self.missing is not None or self.standing

    @cached_property
    def missing_in_a_row(self) -> int:
        return self.record.missing_in_a_row() + 1 if self.is_missing else 0

    @cached_property
    def has_baseline(self) -> bool:
        """Whether the baseline takes part of the traffic."""
        return self.weight < 100

    @cached_property
    def baseline_broken(self) -> bool:
        """Whether the baseline fails half of its requests and the candidate does not.

        Such a baseline never gets all traffic without a person.
        """
        recent = self.span.compared[-HEALTH_BUCKETS:]
        if not self.has_baseline or not recent:
            return False
        broken = any(
            b.baseline.requests >= BREAKER_REQUESTS
            and error_share([b], "baseline") >= BREAKER_SHARE
            for b in recent
        )
        return broken and error_share(recent, "candidate") < BREAKER_SHARE

    @cached_property
    def split_mismatches(self) -> bool:
        """Whether more of the candidate's requests than chance explains were counted nowhere."""
        if not self.has_baseline:
            return False
        if len(self.lost_buckets) >= LOST_BUCKETS:
            return True
        if not self.plan.has_split_check:
            return False
        # Requests are counted when they end, so for as long as a slow one takes after a shift, some
        # were drawn by the split before.
        slow_ms = self.limits.very_slow_ms if self.limits else 0.0
        # Without limits, or with those of a token, no duration of a whole answer is known. 26.12.0 did not wait then.
        if not self.is_of_first_release and (self.limits is None or self.limits.per_token):
            slow_ms = HANGING_MS
        length = timedelta(seconds=self.plan.bucket_seconds)
        drawn = drawn_requests(
            self.span.compared,
            self.record.step_marks(),
            timedelta(milliseconds=slow_ms) + length,
        )
        return drawn is not None and log_e_missing(drawn) >= LOG_MISMATCH

    @cached_property
    def lost_buckets(self) -> Sequence[Bucket]:
        """The newest buckets in which none of the candidate's requests were counted."""
        found: list[Bucket] = []
        newest = self.span.compared[-PROOF_BUCKETS:]
        marks = list(self.record.step_marks().items())
        seen = any(b.candidate.requests for b in self.span.compared[: -PROOF_BUCKETS or None])
        for bucket in newest:
            # Before its first request, the shift may not have taken effect.
            seen = seen or bucket.candidate.requests > 0
            weight = max(
                (w for w, mark in marks if mark.at is None or mark.at < bucket.end), default=0
            )
            expected = bucket.baseline.requests * weight / (100 - weight) if weight < 100 else 0.0
            if seen and not bucket.candidate.requests and expected >= LOST_REQUESTS:
                found.append(bucket)
        # A bucket that neither has may be a gap in the counts of both.
        return [] if any(not b.baseline.requests for b in newest) else found

    @cached_property
    def objective(self) -> float:
        gate = self.plan.error_gate
        return gate.slo_max if gate else 1.0

    @cached_property
    def baseline_unhealthy(self) -> bool:
        recent = self.span.compared[-HEALTH_BUCKETS:]
        if sum(b.baseline.requests for b in recent) < HEALTH_REQUESTS:
            return False
        return error_share(recent, "baseline") > self.objective

    @cached_property
    def outdoes_a_sick_baseline(self) -> bool:
        """Whether the candidate is well now and plainly better than the baseline."""
        recent = self.span.compared[-HEALTH_BUCKETS:]
        ours, theirs = error_share(recent, "candidate"), error_share(recent, "baseline")
        is_proven = any(gate.name == "error" and gate.state == "proven" for gate in self.gates)
        return ours <= self.objective and (is_proven or ours <= theirs / 2)

    @cached_property
    def above_objective(self) -> bool:
        """Whether the candidate's share of errors is too high in itself: two equally bad arms pass the comparison."""
        # An incident that both share says nothing about the candidate.
        usual = [
            bucket
            for bucket in self.span.compared[-PROOF_BUCKETS:]
            if bucket.baseline.requests < OBJECTIVE_REQUESTS
            or error_share([bucket], "baseline") <= self.objective
        ]
        return error_share(usual, "candidate") > self.objective

    @cached_property
    def has_few_callers(self) -> bool:
        """Whether so few callers stay at one deployment that their own health would be taken for the candidate's."""
        if self.plan.large_keys == "spread":
            return False
        newest = self.span.compared[-PROOF_BUCKETS:]
        counts = [b[arm].callers_of_half for b in newest for arm in ARMS]
        known = [number for number in counts if number is not None]
        return bool(known) and known[-1] < FEW_CALLERS


def error_share(buckets: Sequence[Bucket], arm: Arm) -> float:
    """Pooled share of errors, 0..1; 0 without requests."""
    requests = sum(bucket[arm].requests for bucket in buckets)
    return sum(bucket[arm].errors for bucket in buckets) / requests if requests else 0.0


def make_view(
    series: RolloutSeries | str,
    states: States,
    plan: CanaryPlan,
    record: RolloutRecord,
    recorded: Look | None = None,
) -> View:
    """Build the view of one look. `recorded`: the look that is decided again, for facts that only that moment knew."""
    check_formula(record.begun.formula_version)
    known = None if isinstance(series, str) else series
    # The view is built in steps, since the later facts are derived from the earlier ones.
    view = View(
        plan=plan,
        record=record,
        series=known,
        missing=series if isinstance(series, str) else _lost_data(record),
        standing=False,
        baseline=states.baseline,
        candidate=states.candidate,
        gates=(),
        measured=(),
        limits=None,
        tokens=None,
        hanging={},
        is_paused=states.is_paused,
        is_of_first_release=recorded is not None and recorded.step_traffic is None,
    )
    if view.missing or known is None:
        return replace(view, series=None)
    # Counts that are gone make the whole look a missing one: a verdict by the other gates alone would
    # let a candidate advance because one of them was silenced.
    try:
        measured, limits, tokens = tallies.measure(known, record, plan)
        view = replace(
            view,
            measured=measured,
            limits=limits,
            tokens=tokens,
            standing=_stands_still(view, known),
            hanging=_hanging(view, known, limits, recorded),
        )
        return replace(view, gates=_readings(view, measured))
    except Unusable as unusable:
        return replace(view, series=None, missing=str(unusable), standing=False)


def _hanging(
    view: View, series: RolloutSeries, limits: LatencyLimits | None, recorded: Look | None
) -> Mapping[Arm, tuple[int, ...]]:
    """Requests that wait too long now. A replayed look brings its own, because a snapshot is never published again."""
    if recorded is not None:
        return recorded.hanging
    at, buckets = series.at, view.span.all
    if limits is None or not buckets:
        return {}
    # Where limits are per token, no age of a whole answer follows from them.
    age_ms = (
        HANGING_MS if limits.per_token else max(HANGING_MS, HANGING_LIMITS * limits.very_slow_ms)
    )
    hanging: dict[Arm, tuple[int, ...]] = {}
    for arm in ARMS:
        snapshot = series.in_flight.get(arm)
        if snapshot is None:
            continue
        found = [0] * len(buckets)
        for least, most, requests in snapshot.older_than(age_ms):
            last = first_after(buckets, at - timedelta(milliseconds=least))
            first = first_after(buckets, at - timedelta(milliseconds=min(most, _DAY_MS)))
            # Only a range of ages is known. Spread over its buckets, no single one of them can decide
            # by requests that did not arrive together.
            places = range(min(first, len(buckets) - 1), min(last, len(buckets) - 1) + 1)
            for i in range(requests):
                found[places[-1 - i % len(places)]] += 1
        found.reverse()
        # A look keeps what it found in the record, where most of the buckets would be zeros.
        while found and not found[-1]:
            found.pop()
        hanging[arm] = tuple(found)
    return hanging


def _readings(view: View, measured: Sequence[Measured]) -> tuple[GateReading, ...]:
    """Read every gate of the rollout. Raises `Unusable`."""
    begun = view.record.begun
    known = {gate.name: readings.limits_of(view.plan, gate.name) for gate in begun.gates}
    counted = [
        (gate.name, limits)
        for gate in begun.gates
        if gate.state == "active" and gate.source == "series" and (limits := known[gate.name])
    ]
    columns = list(zip(*tallies.count(counted, measured, begun.rollout_id), strict=True))
    names = [name for name, _ in counted]
    counts = dict(zip(names, columns, strict=False))
    by_caller = dict(zip(names, columns[len(names) :], strict=False))
    # At 100 % only what came since then can be tested: before, the candidate had less load.
    first = len(view.span.compared) if view.record.weight == 100 else 0
    ends = [one.bucket.end for one in measured[first:]]
    starts = tuple(
        bisect_right(ends, mark.at) if mark.at else 0 for mark in tallies.term_marks(view.record)
    )
    unequal = frozenset(i for i, one in enumerate(measured) if not one.is_equal_load)
    bounds = tallies.Bounds(first, starts, unequal)
    found: list[GateReading] = []
    for gate in begun.gates:
        limits = known[gate.name]
        if gate.state != "active" or limits is None:
            state = gate.state if gate.state != "active" else "not_evaluated"
            found.append(GateReading(name=gate.name, state=state, reason=gate.reason))
            continue
        stage = readings.Stage(
            phase=view.phase,
            steps=len(view.plan.compared_steps),
            log_threshold=readings.log_threshold(view.plan, begun.gates, gate.name),
            settled=view.is_settled,
            rollout=begun.rollout_id,
        )
        if gate.source == "probes":
            tally = tallies.probe_tally(gate, view.record)
        else:
            rows = list(counts.get(gate.name, ()))
            if gate.name in tallies.LATENCY_GATES:
                rows = _with_hanging(rows, view.hanging, measured)
            distinct = by_caller.get(gate.name, ())
            tally = tallies.tally(gate, view.record, rows, distinct, bounds)
        found.append(readings.read_gate(gate, limits, tally, stage))
    return tuple(found)


def _with_hanging(
    rows: list[BucketCounts],
    hanging: Mapping[Arm, tuple[int, ...]],
    measured: Sequence[Measured],
) -> list[BucketCounts]:
    """Add requests that still wait and have waited too long, in the bucket of their arrival.

    A look counts each of them once: when such a request ends, it leaves the snapshot and comes into a bucket. So the
    evidence is never above that of all requests in the order of their arrival, and the limit on false rollbacks holds.
    """
    pairs = zip_longest(hanging.get("candidate", ()), hanging.get("baseline", ()), fillvalue=0)
    for back, (c, b) in enumerate(pairs, start=1):
        # Where no limit was known, only the slow ones of the bucket would be counted.
        if measured[-back].limits is None:
            continue
        n_c, x_c, n_b, x_b, w_c, v_c = rows[-back]
        rows[-back] = BucketCounts(n_c + c, x_c + c, n_b + b, x_b + b, w_c + c, v_c + c)
    return rows


def _lost_data(record: RolloutRecord) -> str | None:
    """Say that the traffic driver fell silent, where its counts are needed."""
    needs_probes = any(g.source == "probes" and g.state == "active" for g in record.begun.gates)
    # Since the last look: the newest facts are at the end.
    since = takewhile(lambda fact: not isinstance(fact, Look), reversed(record.facts))
    if needs_probes and not any(isinstance(fact, Probed) for fact in since):
        return "no counts from the traffic driver"
    return None


def _stands_still(view: View, series: RolloutSeries) -> bool:
    """Whether a throughput series stopped although a newer bucket was due, or the service's clock stopped."""
    last = view.record.looks[-1] if view.record.looks else None
    if last is None:
        return False
    began = next(iter(view.record.step_marks().values())).at
    before = last.newest
    length = timedelta(seconds=view.plan.bucket_seconds)

    def stands(arm: Arm) -> bool:
        newest = series.newest[arm]
        if newest is None or newest != before[arm] or (began is not None and newest <= began):
            return False
        return series.at >= newest + length or series.at == last.at

    # A candidate at a few percent may rightly have had no request yet.
    if view.has_baseline and stands("baseline"):
        return True
    newest = series.newest["candidate"]
    if newest is None or not stands("candidate"):
        return False
    cut = first_after(view.span.all, newest)
    # The baseline's requests show how many the candidate should have had meanwhile; without them, its
    # own rate of before does.
    if view.has_baseline:
        others = sum(bucket.baseline.requests for bucket in view.span.all[cut:])
        expected = others * view.weight / (100 - view.weight)
    else:
        known = view.span.all[:cut][-HEALTH_BUCKETS:]
        requests = sum(bucket.candidate.requests + bucket.baseline.requests for bucket in known)
        expected = requests / max(len(known), 1) * ((series.at - newest) / length)
    return expected >= MIN_EXPECTED_REQUESTS
