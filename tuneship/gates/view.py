"""What the rules of one look see: the roll-out's state, the gates' readings, and how sound the data are.

Pure and recomputed from the start at every look. Next: `canary.py` holds the rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property

from tuneship.gates import readings, tallies
from tuneship.gates.latency import freeze_limits
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import (
    Gate,
    GateReading,
    LatencyLimits,
    Look,
    Phase,
    Probed,
    Record,
    ThresholdReading,
)
from tuneship.gates.series import ARMS, Arm, Bucket, Series, Unusable, first_after
from tuneship.gates.thresholds import read_thresholds

BREAKER_REQUESTS, BREAKER_SHARE = 20, 0.5
HEALTH_BUCKETS, HEALTH_REQUESTS = 5, 30
LIKELY_REQUESTS = 20


@dataclass(frozen=True)
class Seen:
    """A deployment as just read: its `status` ("missing" for 404, None when it could not be asked) and its replicas."""

    status: str | None
    replicas: int | None = None


@dataclass(frozen=True)
class View:
    """Everything the rules look at."""

    plan: CanaryPlan
    record: Record
    series: Series | None
    missing: str | None
    standing: bool
    baseline: Seen
    candidate: Seen
    gates: tuple[GateReading, ...]
    limits: LatencyLimits | None
    tokens: float | None

    @cached_property
    def phase(self) -> Phase:
        return self.record.phase

    @cached_property
    def weight(self) -> int:
        return self.record.weight

    @cached_property
    def next_weight(self) -> int | None:
        return next((step for step in self.plan.steps if step > self.weight), None)

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
    def step_looks(self) -> list[Look]:
        """Earlier looks at this weight."""
        return [look for look in self.record.looks if look.weight == self.weight]

    @cached_property
    def brought_data(self) -> bool:
        seen = max((look.step_buckets for look in self.step_looks), default=0)
        return len(self.step_buckets) > seen

    @cached_property
    def is_missing(self) -> bool:
        return self.missing is not None or self.standing

    @cached_property
    def missing_in_a_row(self) -> int:
        return self.record.missing_in_a_row() + 1 if self.is_missing else 0

    @cached_property
    def baseline_broken(self) -> bool:
        """The baseline fails half of its requests and the candidate does not: never send it all traffic by machine."""
        recent = self.span.compared[-HEALTH_BUCKETS:]
        if self.phase is Phase.BAKE or not recent:
            return False
        broken = any(
            b.baseline.requests >= BREAKER_REQUESTS
            and error_share([b], "baseline") >= BREAKER_SHARE
            for b in recent
        )
        return broken and error_share(recent, "candidate") < BREAKER_SHARE

    @cached_property
    def baseline_unhealthy(self) -> bool:
        recent = self.span.compared[-HEALTH_BUCKETS:]
        gate = self.plan.error_gate
        if gate is None or sum(b.baseline.requests for b in recent) < HEALTH_REQUESTS:
            return False
        return error_share(recent, "baseline") > gate.slo_max

    @cached_property
    def above_objective(self) -> bool:
        """Two equally bad deployments satisfy the relative half, so the share itself has a limit too."""
        gate = self.plan.error_gate
        return gate is not None and error_share(self.span.compared, "candidate") > gate.slo_max


def error_share(buckets: Sequence[Bucket], arm: Arm) -> float:
    """Pooled share of errors; 0 without requests."""
    requests = sum(bucket[arm].requests for bucket in buckets)
    return sum(bucket[arm].errors for bucket in buckets) / requests if requests else 0.0


def make_view(
    series: Series | str, baseline: Seen, candidate: Seen, plan: CanaryPlan, record: Record
) -> View:
    known = None if isinstance(series, str) else series
    view = View(
        plan=plan,
        record=record,
        series=known,
        missing=series if isinstance(series, str) else _lost_data(series, record),
        standing=False,
        baseline=baseline,
        candidate=candidate,
        gates=(),
        limits=record.limits,
        tokens=None,
    )
    if view.missing or known is None:
        return replace(view, series=None)
    limits = record.limits or freeze_limits(known, view.span.compared)
    tokens = tallies.token_ratio(view.span.compared)
    view = replace(view, limits=limits, tokens=tokens, standing=_stands_still(view, known))
    try:
        return replace(
            view, gates=tuple(_reading(view, known, gate) for gate in record.begun.gates)
        )
    except Unusable as unusable:
        return replace(view, series=None, missing=str(unusable), standing=False)


def _reading(view: View, series: Series, gate: Gate) -> GateReading:
    limits = readings.limits_of(view.plan, gate.name)
    if gate.state != "active" or limits is None:
        state = gate.state if gate.state != "active" else "not_evaluated"
        return GateReading(name=gate.name, state=state, reason=gate.reason)
    latency = view.plan.latency_gates
    scale = 1.0
    if latency is not None and latency.per_output_token and view.tokens is not None:
        scale = min(max(view.tokens, 1.0), 3.0)
    stage = readings.Stage(
        phase=view.phase,
        steps=len(view.plan.compared_steps),
        log_threshold=readings.log_threshold(view.plan, view.record.begun.gates),
    )
    return readings.read_gate(
        gate, limits, tallies.tally(gate, series, view.record, view.limits, scale), stage
    )


def _lost_data(series: Series, record: Record) -> str | None:
    """A null where there was a value before, or a source of counts that fell silent."""
    last = record.looks[-1] if record.looks else None
    if last is not None:
        known = {"baseline": last.unvalued_baseline, "candidate": last.unvalued_candidate}
        for arm in ARMS:
            if series.unvalued(arm, last.horizon) > known[arm]:
                return f"throughput of the {arm} turned null"
    needs_probes = any(g.source == "probes" and g.state == "active" for g in record.begun.gates)
    since = record.facts[record.facts.index(last) + 1 :] if last else record.facts
    if needs_probes and not any(isinstance(fact, Probed) for fact in since):
        return "no counts from the traffic driver"
    return None


def _stands_still(view: View, series: Series) -> bool:
    """A throughput series of this roll-out stopped, although a newer bucket was due or the clock itself stopped."""
    last = view.record.looks[-1] if view.record.looks else None
    if last is None:
        return False
    began = next(iter(view.record.step_marks().values())).at
    before: dict[Arm, datetime | None] = {
        "baseline": last.newest_baseline,
        "candidate": last.newest_candidate,
    }
    length = timedelta(seconds=view.plan.bucket_seconds)

    def stands(arm: Arm) -> bool:
        newest = series.newest[arm]
        if newest is None or newest != before[arm] or (began is not None and newest <= began):
            return False
        return series.at >= newest + length or series.at == last.at

    if view.phase is not Phase.BAKE and stands("baseline"):
        return True
    return stands("candidate") and _expected_requests(view, series) >= LIKELY_REQUESTS


def _expected_requests(view: View, series: Series) -> float:
    """Requests that the candidate should have had since its newest bucket, had it been asked like before."""
    newest = series.newest["candidate"]
    cut = first_after(view.span.all, newest)
    if view.phase is not Phase.BAKE:
        others = sum(bucket.baseline.requests for bucket in view.span.all[cut:])
        return others * view.weight / (100 - view.weight)
    known = view.span.all[:cut][-HEALTH_BUCKETS:]
    if not known or newest is None:
        return 0.0
    requests = sum(bucket.candidate.requests + bucket.baseline.requests for bucket in known)
    length = timedelta(seconds=view.plan.bucket_seconds)
    return requests / len(known) * ((series.at - newest) / length)
