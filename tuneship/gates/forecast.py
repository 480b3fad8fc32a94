"""Forecasts a plan at today's traffic before anything is shifted: how long it takes, and what it cannot prove.

Pure: rollouts are drawn from fixed seeds and decided by `canary.judge` itself, so that a forecast is always the same
and never knows better than the gates. Looks that come between the ends of two buckets learn nothing and are not drawn.
Takes one to two seconds. Next: `canary.py`.
"""

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from tuneship.gates.canary import judge
from tuneship.gates.gate_types import Gate, LatencyLimits, UsualHour
from tuneship.gates.kinds import GATES
from tuneship.gates.metrics.series import ARMS, ArmTraffic, Bucket, RolloutSeries
from tuneship.gates.outlook import (
    DOUBLING,
    INSUFFICIENT_DATA,
    UNHEALTHY_BASELINE,
    Forecast,
    Today,
    Unprovable,
)
from tuneship.gates.plan import CanaryPlan, CanaryRules
from tuneship.gates.readings import limits_of, log_threshold
from tuneship.gates.record import Begun, Look, RolloutRecord, SplitConfirmed, Verdict
from tuneship.gates.statistics.cells import Cells
from tuneship.gates.view import DeploymentState, States

# The candidate's extra share of errors whose discovery is forecast, beside a doubling.
MORE_ERRORS_SHARE = 0.05
MAX_FIRST_STEP_PERCENT = 50
# Twenty runs, for nine of ten; with little traffic, as many as cost about half a second.
RUNS, _LEAST_RUNS, _MOST_STEPS = 20, 9, 600
# The looks of a step that are judged one by one; then every second one, every third one, and so on.
_EVERY_LOOK = 12


Bell = tuple[tuple[int, ...], tuple[float, ...]]


# Times and lengths of log-normal answers, by cell: usual spreads, since a forecast asks when equal
# candidates are proven, and the limits are set by the same answers.
def _log_normal(middle: int, spread: float, step: int) -> Bell:
    """Cells around the middle, and the chance of a value up to each; 1 at the last."""
    bell = statistics.NormalDist(middle, spread)
    cells = tuple(range(middle - 40, middle + 41, step))
    return cells, (*map(bell.cdf, cells[:-1]), 1.0)


_TIMES, _LENGTHS = _log_normal(138, 11.4, 2), _log_normal(81, 13.9, 4)
_USUAL = UsualHour(LatencyLimits(395.0, 900.0, 1900.0, 1000), 6.0, 200.0, math.inf)
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_BOTH_RUN = States(DeploymentState("running", 1), DeploymentState("running", 1))


def forecast(plan: CanaryPlan, today: Today, gates: Sequence[Gate]) -> Forecast:
    """Forecast a rollout that begins now, with `gates` as `readings.choose_gates` would fix them."""
    # Nothing needs to be drawn where the first step's requests cannot be enough.
    minutes = plan.longest_step_seconds / 60.0
    requests = sum(
        today.rate_after(60.0 * hour) * min(60.0, minutes - 60.0 * hour)
        for hour in range(int(minutes // 60) + 1)
    )
    expected = requests * plan.known_steps[0] / 100.0
    if expected < plan.min_requests_per_step:
        why = (
            f"{plan.known_steps[0]} % of the requests that come within {minutes / 60:.3g} h are about"
            f" {expected:.2g}, fewer than the {plan.min_requests_per_step} that a step needs"
        )
        return Forecast(unprovable=(Unprovable(INSUFFICIENT_DATA, why),))

    begun = _begin(plan, gates)
    # A step cannot end before its least number of looks, and little else ends an equal candidate.
    ends = _several(plan, today, today.errors, begun, plan.min_looks_per_step)
    promoted = [end.minutes for end in ends if end.look.verdict in (Verdict.PROMOTE, Verdict.ASK)]
    half, most = _quantiles(promoted, len(ends))
    unprovable = () if half is not None else _unprovable([end.look for end in ends])
    doubling: Quantiles = (None, None)
    # What lies within the margin is no harm by the plan's own words, so no evidence against it grows.
    limits, doubled = limits_of(plan, "error"), 2.0 * today.errors
    margin = max((limits.ratio or 0.0) * today.errors, limits.harm or 0.0) if limits else 1.0
    if doubled > margin:
        doubling = _minutes_to_find(plan, today, doubled, begun)
    else:
        share = f"{100 * today.errors:.2g} % errors" if today.errors else "no errors"
        why = f"a doubling of {share} is within the plan's margin"
        unprovable = (*unprovable, Unprovable(DOUBLING, why))
    more = _minutes_to_find(plan, today, today.errors + MORE_ERRORS_SHARE, begun)
    return Forecast(
        half,
        most,
        *doubling,
        *more,
        unprovable,
        drawn=len(ends),
        promoted=len(promoted),
        slowest_minutes=max(promoted, default=None),
        undecided=sum("max_looks" in end.look.reasons for end in ends),
    )


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
    """A new record that begins now, with the gates whose counts the service publishes."""
    # What the driver alone counts depends on answers, which cannot be drawn.
    counted = tuple(
        Gate(gate.name, gate.reason, "series", gate.state)
        for gate in gates
        if gate.name in GATES and (GATES[gate.name].count or gate.state != "active")
    )
    begun = Begun("forecast", "", {}, plan.digest(), counted, _USUAL)
    return RolloutRecord((begun, SplitConfirmed(plan.known_steps[0], _EPOCH)))


@dataclass(frozen=True)
class _End:
    """The last look of a simulated rollout, and how long it took."""

    look: Look
    minutes: float


Quantiles = tuple[float | None, float | None]


def _quantiles(reached: Sequence[float], runs: int) -> Quantiles:
    """The minutes within which half of all runs got there, and nine of ten; None where fewer did.

    The k-th of n times is not exceeded by the next run with a chance of k / (n + 1).
    """
    times = sorted(reached)
    places = (math.ceil(share * (runs + 1)) - 1 for share in (0.5, 0.9))
    half, most = (times[place] if place < len(times) else None for place in places)
    return half, most


def _several(
    plan: CanaryPlan, today: Today, errors: float, begun: RolloutRecord, first: int = 1
) -> list[_End]:
    """Simulate rollouts until there are enough, or until the allowed computing time is used.

    `first`: the first look of a step that is judged.
    """
    ends: list[_End] = []
    steps = 0
    while len(ends) < RUNS and (len(ends) < _LEAST_RUNS or steps < _MOST_STEPS):
        # Drawn from the traffic itself, so that the same traffic has the same forecast.
        dice = random.Random(repr((today, errors, len(ends))))  # noqa: S311 - no secret
        end, cost = _draw(plan, today, errors, begun, first, dice)
        ends.append(end)
        steps += cost
    return ends


def _minutes_to_find(
    plan: CanaryPlan, today: Today, errors: float, begun: RolloutRecord
) -> Quantiles:
    # The error gate alone finds them, at the threshold that the gates beside it leave it.
    gates = tuple(gate for gate in begun.begun.gates if gate.name == "error")
    alone = RolloutRecord((replace(begun.begun, gates=gates), *begun.facts[1:]))
    threshold = log_threshold(plan, begun.begun.gates, "error")
    plan = plan.model_copy(update={"alpha": math.exp(-threshold)})
    ends = _several(plan, today, errors, alone)
    # A bad candidate that is only stopped because its looks are used up was not found.
    found = [
        end.minutes
        for end in ends
        if end.look.verdict is Verdict.ROLLBACK
        and end.look.reason == "error_rate"
        and "max_looks" not in end.look.reasons
    ]
    return _quantiles(found, len(ends))


def _draw(
    plan: CanaryPlan,
    today: Today,
    errors: float,
    record: RolloutRecord,
    first: int,
    dice: random.Random,
) -> tuple[_End, int]:
    """Simulate one rollout until it ends. Returns it, and the numbers of its buckets and looks."""
    buckets: list[Bucket] = []
    skipped: list[Look] = []
    length = timedelta(seconds=plan.bucket_seconds)
    minutes = plan.data_every_seconds / 60.0
    last: Look | None = None
    at_step = due = looks = requests = 0
    while True:
        total = _poisson(dice, today.rate_after(len(buckets) * minutes) * minutes)
        n_c = _binomial(dice, total, record.weight / 100.0)
        end = _EPOCH + length * (len(buckets) + 1)
        baseline = _serve(dice, total - n_c, today, today.errors)
        buckets.append(Bucket(end, baseline, _serve(dice, n_c, today, errors)))
        at_step += 1
        requests += buckets[-1].candidate.requests
        # In a long step, one look more or less changes the time by little.
        if last is not None and at_step < due:
            seen = last.step_buckets if last.weight == record.weight else 0
            skipped.append(
                replace(
                    last,
                    number=len(buckets),
                    weight=record.weight,
                    verdict=Verdict.HOLD,
                    brought_data=True,
                    step_buckets=seen,
                    step_requests=requests,
                    step_traffic=requests,
                )
            )
            continue
        series = RolloutSeries(
            tuple(buckets), end, dict.fromkeys(ARMS, end), dict.fromkeys(ARMS, None)
        )
        record = record.plus(*skipped)
        last = judge(series, _BOTH_RUN, plan, record)
        record = record.plus(last)
        looks += 1
        due = max(at_step + 1 + at_step // _EVERY_LOOK, first)
        skipped.clear()
        if last.verdict is Verdict.ADVANCE:
            record = record.plus(SplitConfirmed(last.next_weight or 0, last.at))
            at_step = requests = 0
            due = first
        elif last.verdict is not Verdict.HOLD:
            return _End(last, len(buckets) * minutes), len(buckets) + looks


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


def _cells(dice: random.Random, n: int, bell: Bell) -> Cells:
    """Draw the latency cells of this many answers; a small number is drawn one by one."""
    cells, below = bell
    found: Counter[int] = Counter()
    if n <= len(cells):
        found.update(dice.choices(cells, cum_weights=below, k=n))
    else:
        left, beyond = n, 1.0
        for k, up_to in zip(cells, below, strict=True):
            found[k] = _binomial(dice, left, min(1.0 - (1.0 - up_to) / beyond, 1.0))
            left, beyond = left - found[k], max(1.0 - up_to, 1e-12)
    pairs = sorted((k, number) for k, number in found.items() if number)
    return Cells(tuple(k for k, _ in pairs), tuple(number for _, number in pairs))


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
    found += [Unprovable(reason, "too few requests within the plan's checks") for reason in reasons]
    # First, since it is the reason that more traffic does not remove.
    unhealthy = any("baseline_unhealthy" in look.reasons for look in ends)
    if unhealthy:
        found.insert(
            0, Unprovable(UNHEALTHY_BASELINE, "the baseline fails more often than `slo_max` allows")
        )
    return tuple(found)


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
