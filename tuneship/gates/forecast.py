"""Forecasts a plan at today's traffic before anything is shifted: how long it takes, and what it cannot prove.

Pure: rollouts are drawn from fixed seeds and decided by `canary.judge` itself, so that a forecast is always the same
and never knows better than the gates. Looks that come between the ends of two buckets learn nothing and are not drawn.
Takes about a second. Next: `canary.py`.
"""

import math
import random
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from tuneship.gates.canary import judge
from tuneship.gates.cells import Cells
from tuneship.gates.gate_types import Gate, LatencyLimits, UsualHour
from tuneship.gates.kinds import GATES
from tuneship.gates.outlook import (
    DOUBLING,
    INSUFFICIENT_DATA,
    UNHEALTHY_BASELINE,
    Forecast,
    Today,
    Unprovable,
)
from tuneship.gates.plan import CanaryPlan, CanaryRules
from tuneship.gates.readings import limits_of
from tuneship.gates.record import Begun, Look, RolloutRecord, SplitConfirmed, Verdict
from tuneship.gates.series import ARMS, ArmTraffic, Bucket, RolloutSeries
from tuneship.gates.view import DeploymentState

# The candidate's extra share of errors whose discovery is forecast, beside a doubling.
MORE_ERRORS_SHARE = 0.05
MAX_FIRST_STEP_PERCENT = 50
# Three runs at least, for a median; more until the looks drawn cost about a second.
_LOOKS_DRAWN, _RUNS = 200, (3, 10)


# Times and lengths of log-normal answers, by cell: usual spreads, since a forecast asks when equal
# candidates are proven, and the limits are set by the same answers.
def _log_normal(middle: int, spread: float, step: int) -> tuple[tuple[int, float], ...]:
    """Cells around the middle, each with the chance that a value beyond the cells before it lies in it."""
    bell = statistics.NormalDist(middle, spread)
    cells = [(k, bell.cdf(k) - bell.cdf(k - step)) for k in range(middle - 40, middle + 41, step)]
    left, found = 1.0, list[tuple[int, float]]()
    for k, chance in cells:
        found.append((k, min(chance / left, 1.0)))
        left -= chance
    return tuple(found)


_TIMES, _LENGTHS = _log_normal(138, 11.4, 2), _log_normal(81, 13.9, 4)
_USUAL = UsualHour(LatencyLimits(395.0, 900.0, 1900.0, 1000), 6.0, 200.0, math.inf)
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_RUNNING = DeploymentState("running", 1)


def forecast(plan: CanaryPlan, today: Today, gates: Sequence[Gate]) -> Forecast:
    """Forecast a rollout that begins now. `gates`: as `readings.choose_gates` fixes them for it."""
    # Nothing needs to be drawn where the first step's requests cannot be enough.
    per_look = (
        today.requests_per_minute * plan.data_every_seconds / 60.0 * plan.known_steps[0] / 100.0
    )
    if per_look * plan.max_looks_per_step < plan.min_requests_per_step:
        why = (
            f"{plan.known_steps[0]} % of {today.requests_per_minute:.3g} requests a minute are fewer than the"
            f" {plan.min_requests_per_step} that a step needs within {plan.max_looks_per_step} looks"
        )
        lacking = Unprovable(INSUFFICIENT_DATA, why)
        return Forecast(None, None, None, None, (lacking,), _sentence(None, None, None, lacking))

    begun = _begin(plan, gates)
    equal = _several(plan, today, today.errors, begun, _RUNS[1])
    promoted = sorted(run.number for run in equal if run.verdict in (Verdict.PROMOTE, Verdict.ASK))
    minutes = plan.data_every_seconds / 60.0
    typical = most = None
    # Where half of the equal candidates are not promoted in time, nobody can say when they will be.
    if 2 * len(promoted) > len(equal):
        typical = statistics.median(promoted) * minutes
        most = promoted[min(len(promoted) - 1, math.ceil(0.9 * len(promoted)) - 1)] * minutes
    unprovable = () if typical is not None else _unprovable(equal)
    doubling = None
    # What lies within the margin is no harm by the plan's own words, so no evidence against it grows.
    limits, doubled = limits_of(plan, "error"), 2.0 * today.errors
    if limits is not None and doubled > max(limits.ratio * today.errors, limits.harm):
        doubling = _minutes_to_find(plan, today, doubled, begun)
    else:
        share = f"{100 * today.errors:.2g} % errors" if today.errors else "no errors"
        why = f"a doubling of {share} is within the plan's margin"
        unprovable = (*unprovable, Unprovable(DOUBLING, why))
    more = _minutes_to_find(plan, today, today.errors + MORE_ERRORS_SHARE, begun)
    first = unprovable[0] if unprovable and typical is None else None
    sentence = _sentence(typical, doubling, more, first)
    promoted_share = len(promoted) / len(equal)
    return Forecast(typical, most, doubling, more, unprovable, sentence, promoted_share)


def choose_steps(requests_per_minute: float, plan: CanaryRules) -> list[int]:
    """Choose the steps: the first one brings enough requests in its shortest stay, and is at most 50 %."""
    # Half of the traffic at once is as far as an untried model may go, however few the requests are.
    looks = plan.min_looks_per_step * plan.data_every_seconds / 60.0
    needed = 100.0 * plan.min_requests_per_step / max(requests_per_minute * looks, 1e-9)
    first = min(max(plan.known_steps[0], math.ceil(min(needed, 100.0))), MAX_FIRST_STEP_PERCENT)
    if first not in plan.known_steps:
        first = min(5 * math.ceil(first / 5), MAX_FIRST_STEP_PERCENT)
    return [first, *(step for step in plan.known_steps if step > first)]


def _begin(plan: CanaryPlan, gates: Sequence[Gate]) -> RolloutRecord:
    """A record that begins now, with those gates whose counts the service publishes."""
    # What the driver alone counts depends on answers, which cannot be drawn.
    counted = tuple(
        Gate(gate.name, gate.reason, "series", gate.state)
        for gate in gates
        if gate.name in GATES and (GATES[gate.name].count or gate.state != "active")
    )
    begun = Begun("forecast", "", {}, plan.digest(), counted, _USUAL)
    return RolloutRecord((begun, SplitConfirmed(plan.known_steps[0], _EPOCH)))


def _several(
    plan: CanaryPlan, today: Today, errors: float, begun: RolloutRecord, most: int
) -> list[Look]:
    """Simulate a few rollouts, as many as fit into about a second, and return their last looks."""
    ends: list[Look] = []
    while len(ends) < most:
        # The number of the run is its seed, so that the same traffic has the same forecast.
        ends.append(_draw(plan, today, errors, begun, random.Random(len(ends))))  # noqa: S311 - no secret
        if len(ends) >= _RUNS[0] and sum(look.number for look in ends) > _LOOKS_DRAWN:
            break
    return ends


def _minutes_to_find(
    plan: CanaryPlan, today: Today, errors: float, begun: RolloutRecord
) -> float | None:
    # A bad candidate that is only stopped because its looks are used up was not found.
    ends = _several(plan, today, errors, begun, _RUNS[0])
    found = [
        look.number
        for look in ends
        if look.verdict is Verdict.ROLLBACK
        and look.reason == "error_rate"
        and "max_looks" not in look.reasons
    ]
    if 2 * len(found) < len(ends):
        return None
    return statistics.median(found) * plan.data_every_seconds / 60.0


def _draw(
    plan: CanaryPlan, today: Today, errors: float, record: RolloutRecord, dice: random.Random
) -> Look:
    """Simulate one rollout to its promotion or its end."""
    buckets: list[Bucket] = []
    length = timedelta(seconds=plan.bucket_seconds)
    per_look = today.requests_per_minute * plan.data_every_seconds / 60.0
    while True:
        total = _poisson(dice, per_look)
        n_c = _binomial(dice, total, record.weight / 100.0)
        end = _EPOCH + length * (len(buckets) + 1)
        baseline = _serve(dice, total - n_c, today, today.errors)
        buckets.append(Bucket(end, baseline, _serve(dice, n_c, today, errors)))
        series = RolloutSeries(
            tuple(buckets), end, dict.fromkeys(ARMS, end), dict.fromkeys(ARMS, None)
        )
        look = judge(series, _RUNNING, _RUNNING, plan, record)
        record = record.plus(look)
        if look.verdict is Verdict.ADVANCE:
            record = record.plus(SplitConfirmed(look.next_weight or 0, look.at))
        elif look.verdict is not Verdict.HOLD:
            return look


def _serve(dice: random.Random, n: int, today: Today, errors: float) -> ArmTraffic:
    cancelled = _binomial(dice, n, today.abandoned)
    refused = _binomial(dice, n - cancelled, today.refused)
    requests = n - cancelled - refused
    failed = _binomial(dice, requests, min(errors, 1.0))
    served = requests - failed
    return ArmTraffic(
        requests=requests,
        errors=failed,
        empty=_binomial(dice, served, today.blank),
        cancelled=cancelled,
        refused=refused,
        error_callers=failed,
        cells=_cells(dice, served, _TIMES),
        token_cells=_cells(dice, served, _LENGTHS),
    )


def _cells(dice: random.Random, left: int, chances: Sequence[tuple[int, float]]) -> Cells:
    found: list[tuple[int, int]] = []
    for k, chance in chances:
        number = _binomial(dice, left, chance)
        if number:
            found.append((k, number))
        left -= number
    return Cells(tuple(k for k, _ in found), tuple(number for _, number in found))


def _unprovable(ends: Sequence[Look]) -> tuple[Unprovable, ...]:
    """Name the gates and the reasons that kept equal candidates from being promoted."""
    held = [
        gate
        for look in ends
        for gate in look.gates
        if gate.state in ("open", "hold", "harm", "not_evaluated")
    ]
    names = sorted({gate.name for gate in held})
    found = [Unprovable(name, f"the gate {name} is not proven at this traffic") for name in names]
    reasons = sorted({look.reason for look in ends if look.reason == INSUFFICIENT_DATA})
    found += [Unprovable(reason, "too few requests within the plan's looks") for reason in reasons]
    # First, since it is the reason that more traffic does not remove.
    unhealthy = any("baseline_unhealthy" in look.reasons for look in ends)
    if unhealthy:
        found.insert(
            0, Unprovable(UNHEALTHY_BASELINE, "the baseline fails more often than `slo_max` allows")
        )
    return tuple(found)


def _sentence(
    typical: float | None, doubling: float | None, more: float | None, lacking: Unprovable | None
) -> str:
    parts = [
        f"about {_minutes(typical)} to promote an equal candidate"
        if typical is not None
        else "an equal candidate cannot be promoted at this traffic"
        + (f": {lacking.why}" if lacking else "")
    ]
    if doubling is not None:
        parts.append(f"a doubling of errors is found within {_minutes(doubling)}")
    if more is not None:
        parts.append(f"five points more errors are found within {_minutes(more)}")
    return "; ".join(parts)


def _minutes(minutes: float) -> str:
    if minutes < 2:
        return f"{round(60 * minutes)} seconds"
    return f"{math.ceil(minutes)} minutes"


def _poisson(dice: random.Random, mean: float) -> int:
    # Multiplying uniform numbers (Knuth) takes as many draws as there are requests, so it is left to
    # small means; the normal distribution is close enough beyond.
    if mean > 50:
        return max(0, round(dice.gauss(mean, math.sqrt(mean))))
    limit, product, number = math.exp(-mean), dice.random(), 0
    while product > limit:
        product *= dice.random()
        number += 1
    return number


def _binomial(dice: random.Random, n: int, p: float) -> int:
    """Draw by inversion where few are expected, else from the normal distribution, close enough for a forecast."""
    if n <= 0 or p <= 0.0:
        return 0
    if p > 0.5:
        return n - _binomial(dice, n, 1.0 - p)
    if n * p > 30:
        return min(n, max(0, round(dice.gauss(n * p, math.sqrt(n * p * (1.0 - p))))))
    left, chance, k = dice.random(), (1.0 - p) ** n, 0
    while left > chance and k < n:
        left -= chance
        k += 1
        chance *= (n - k + 1) / k * p / (1.0 - p)
    return k
