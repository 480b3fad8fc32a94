"""The rules that decide: our gates, look by look with a record as the flow writes it, and Argo's and Kayenta's rules.

The rivals are imitations in a few lines with their usual settings, on the same traffic: five minutes a step, then half
an hour at 100 %.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.unit.gates.drawn.kinds import Kind
from tests.unit.gates.drawn.worlds import EDGES, HOUR_BEFORE, Service
from tests.unit.gates.rollouts import RUNNING, START, plan_with
from tuneship.contract.metrics import MetricSeries
from tuneship.gates.canary import judge
from tuneship.gates.latency import usual_hour
from tuneship.gates.metrics.series import ARMS, Arm, ArmTraffic, Bucket, InFlightAges, RolloutSeries
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.readings import choose_gates
from tuneship.gates.record import Begun, Look, RolloutRecord, SplitConfirmed, Verdict
from tuneship.gates.view import States

# Minutes for which a rival watches the candidate at 100 %.
WATCHED = 30


@dataclass(frozen=True)
class Run:
    """The end of one rollout."""

    is_promoted: bool
    # Number of looks until it was promoted (weight above the compared steps) or stopped.
    looks: int
    reason: str = ""

    @property
    def is_inconclusive(self) -> bool:
        return self.reason == "inconclusive"


def series_of(
    buckets: Sequence[Bucket], service: Service | None = None, at: int = 0
) -> RolloutSeries:
    newest = buckets[-1].end if buckets else None
    snapshots: dict[Arm, InFlightAges | None] = {}
    if service:
        snapshots = {arm: service.in_flight(arm, at) for arm in ARMS}
    return RolloutSeries(
        buckets=tuple(buckets),
        at=newest or START,
        newest=dict.fromkeys(ARMS, newest),
        edges_ms=dict.fromkeys(ARMS, EDGES),
        in_flight=snapshots,
    )


NONE_YET: dict[str, Any] = {"per_doubling": 16, "index": [], "count": []}
# The counts that the service publishes.
PUBLISHED = MetricSeries.model_validate(
    {
        "latency": {"cells": NONE_YET, "cells_per_token": NONE_YET},
        "token_usage": {"empty_count": [], "cells": NONE_YET},
        "error_rate": {"cancelled_count": [], "refused_count": [], "error_callers": []},
    }
)


def begin(plan: CanaryPlan, hour: Sequence[Bucket], seed: int) -> RolloutRecord:
    """Begin a record as the flow does."""
    begun = Begun(
        f"ro_{seed}",
        "cep_1",
        {},
        plan.digest(),
        choose_gates(plan, PUBLISHED),
        usual_hour(series_of(hour), plan),
    )
    return RolloutRecord((begun, SplitConfirmed(plan.known_steps[0], START)))


def roll_out(kind: Kind, seed: int, **fields: Any) -> Run:
    """Run one rollout by our gates."""
    rng = np.random.default_rng([seed, kind.row])
    service = Service(rng, kind.make(rng), kind.seconds)
    plan = plan_with(
        **{
            "bake_weight": 80,
            "wait_for_traffic": "12h",
            "interval": f"{kind.seconds}s",
            **kind.plan,
            **fields,
        }
    )
    hour = [service.bucket(i, 0) for i in range(-HOUR_BEFORE if kind.has_past else 0, 0)]
    return _looks(service, plan, begin(plan, hour, seed), hour[-10:], lag=kind.lag)


ENDS = (Verdict.ROLLBACK, Verdict.PAUSE, Verdict.ABORT, Verdict.BAKED)


def _looks(
    service: Service, plan: CanaryPlan, record: RolloutRecord, before: Sequence[Bucket], *, lag: int
) -> Run:
    buckets: list[Bucket] = list(before)
    minute = seen = promoted_at = 0
    weights: list[int] = [0] * lag
    while True:
        weights.append(record.weight)
        buckets.append(service.bucket(minute, weights[minute]))
        unseen = service.minute_of(minute, weights[minute]).unseen
        minute += 1
        seen = seen if unseen else len(buckets)
        series = series_of(buckets[:seen], service, minute - 1)
        look = judge(series, States(RUNNING, RUNNING), plan, record)
        record = record.plus(look)
        if look.verdict is Verdict.PROMOTE:
            promoted_at = look.number
        if look.verdict in (Verdict.ADVANCE, Verdict.PROMOTE):
            record = record.plus(SplitConfirmed(look.next_weight or -1, look.at))
        if look.verdict in ENDS:
            return _run(look, promoted_at)


def _run(look: Look, promoted_at: int) -> Run:
    if look.verdict is Verdict.BAKED:
        return Run(True, promoted_at)
    is_inconclusive = "max_looks" in look.reasons
    return Run(False, look.number, "inconclusive" if is_inconclusive else look.reason)


STEPS = (5, 25, 50, 75)


def watched(kind: Kind, seed: int) -> tuple[list[Bucket], list[Bucket]]:
    """Return the traffic that the rivals look at: the hour before, and a rollout that is never stopped."""
    rng = np.random.default_rng([seed, kind.row])
    service = Service(rng, kind.make(rng), kind.seconds)
    hour = [service.bucket(i, 0) for i in range(-HOUR_BEFORE, 0)]
    weights = [step for step in STEPS for _ in range(5)] + [100] * WATCHED
    return hour, [service.bucket(i, w) for i, w in enumerate(weights)]


def _p95(traffic: ArmTraffic) -> float | None:
    if not traffic.histogram:
        return None
    i = int(np.searchsorted(traffic.histogram, 0.95 * traffic.histogram[-1]))
    low, high = (EDGES[i - 1] if i else 0.5), min(EDGES[i], 2 * EDGES[-2])
    before = traffic.histogram[i - 1] if i else 0
    part = (0.95 * traffic.histogram[-1] - before) / (traffic.histogram[i] - before)
    return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))


def argo(hour: Sequence[Bucket], buckets: Sequence[Bucket], failure_limit: int) -> Run:
    """Each minute needs success >= 95 % and p95 <= 1.5 x the baseline's earlier one. Too many failures abort."""
    usual = statistics.median(p95 for b in hour if (p95 := _p95(b.baseline)) is not None)
    failures = 0
    for minute, bucket in enumerate(buckets, start=1):
        one = bucket.candidate
        p95 = _p95(one)
        slow = p95 is not None and p95 > 1.5 * usual
        failures += (one.requests > 0 and one.errors > 0.05 * one.requests) or slow
        if failures > failure_limit:
            return Run(False, minute, "check")
    return Run(True, 20)


def kayenta(buckets: Sequence[Bucket]) -> Run:
    """Compare the buckets' values by Mann-Whitney at the end of each step (98 %, 25 % tolerance). There is no bake."""
    for step in range(len(STEPS)):
        part = buckets[5 * step : 5 * step + 5]
        if any(_is_higher(part, value) for value in (_error_share, _p95)):
            return Run(False, 5 * step + 5, "metric")
    return Run(True, 20)


def _error_share(traffic: ArmTraffic) -> float | None:
    return traffic.errors / traffic.requests if traffic.requests else None


def _is_higher(part: Sequence[Bucket], value: Callable[[ArmTraffic], float | None]) -> bool:
    ours = [one for b in part if (one := value(b.candidate)) is not None]
    theirs = [1.25 * one for b in part if (one := value(b.baseline)) is not None]
    n, m = len(ours), len(theirs)
    if not n or not m:
        return False
    u = sum((x > y) + 0.5 * (x == y) for x in ours for y in theirs)
    z = (u - n * m / 2 - 0.5) / math.sqrt(n * m * (n + m + 1) / 12)
    return 0.5 * math.erfc(z / math.sqrt(2)) < 0.02


def runs_of(kind: Kind, seeds: Iterable[int], **fields: Any) -> list[Run]:
    return [roll_out(kind, seed, **fields) for seed in seeds]


def share_wrong(kind: Kind, runs: Sequence[Run]) -> float:
    """Return the share of the runs that did not end as they must."""
    return sum(run.is_promoted != kind.must_be_promoted for run in runs) / len(runs)
