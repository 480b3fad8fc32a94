"""Forecasts a plan with today's traffic before the first shift, and warns about it or refuses it.

They are sentences for people; the rollout's page, its report and its result take them from the record.
Knows no service: `opening.py` brings the baseline's metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from flows.rollout.result import RolloutResult, rejected
from tuneship.contract.metrics import DeploymentMetrics
from tuneship.gates.forecast import choose_steps, forecast
from tuneship.gates.gate_types import Gate, UsualHour
from tuneship.gates.latency import FROZEN_FROM, last_hour, least_slowdown
from tuneship.gates.metrics.series import RolloutSeries
from tuneship.gates.outlook import Forecast, Today
from tuneship.gates.plan import USUAL_STEPS, CanaryPlan
from tuneship.gates.record import NO_USUAL
from tuneship.gates.reports.words import rate_in_words
from tuneship.gates.view import HANGING_LIMITS, HANGING_MS

HOURS = 24
# Traffic that began later than this may still be growing, and refuses nothing.
KNOWN_AFTER = timedelta(minutes=15)
HELP = (
    "more requests would help (`traffic` lets the pipeline send its own), or a larger first step (`steps: auto`), or"
    " more time (`wait_for_traffic`)"
)


@dataclass(frozen=True)
class Before:
    """The baseline's metrics from before the start."""

    answer: DeploymentMetrics | None = None
    series: RolloutSeries | None = None
    usual: UsualHour = NO_USUAL
    # The last day by the hour, where it is known.
    day: RolloutSeries | None = None


@dataclass(frozen=True)
class EndpointTraffic:
    """The endpoint's traffic, and how sure that is."""

    today: Today
    is_certain: bool


@dataclass(frozen=True)
class Expected:
    """The plan, the forecast and the warnings at the start of a rollout."""

    # With the steps that it will take.
    plan: CanaryPlan
    today: Today | None = None
    forecast: Forecast | None = None
    warnings: tuple[str, ...] = ()


def expect(
    plan: CanaryPlan, before: Before, gates: Sequence[Gate], endpoint_id: str
) -> Expected | RolloutResult:
    """Fix the plan's steps and forecast it, or refuse it before anything is shifted."""
    outrun, is_refused = _outrun_timeout(plan, before)
    if is_refused:
        return rejected("shorter_than_timeout", outrun, endpoint_id)
    warnings = [text for text in (outrun, _coarse(plan, before)) if text]
    traffic = _traffic(plan, before)
    plan = with_steps(plan, traffic.today if traffic else None)
    end = "pauses for a person" if plan.on_inconclusive == "pause" else "returns the traffic"
    if traffic is None:
        unknown = (
            "nothing is known of this endpoint's traffic, so nothing can be forecast; a step without"
            f" {plan.min_requests_per_step} requests within {_longest(plan)} {end}; {HELP}"
        )
        return Expected(plan, warnings=(*warnings, unknown))

    expected = forecast(plan, traffic.today, gates)
    if expected.lacks_traffic:
        rate = rate_in_words(traffic.today)
        warnings.append(
            f"at {rate} not even an equal candidate is promoted within {_longest(plan)} a step, and the"
            f" rollout then {end}; {HELP}"
        )
        # A pause leaves the decision to a person, so too little traffic forbids nothing there.
        may_begin = plan.on_inconclusive == "pause" or plan.on_little_traffic == "go_on"
        if traffic.is_certain and not may_begin:
            note = f"{warnings[-1]}; `on_little_traffic: go_on` begins all the same"
            return rejected("too_little_traffic", note, endpoint_id)
    return Expected(plan, traffic.today, expected, tuple(warnings))


def with_steps(plan: CanaryPlan, today: Today | None) -> CanaryPlan:
    """Replace `steps: auto` by steps that fit the traffic; the usual ones if the traffic is unknown."""
    if plan.steps != "auto":
        return plan
    if today is None:
        return plan.model_copy(update={"steps": [*USUAL_STEPS]})
    # A step that a night needs would be a large one for the morning that it may wait for.
    busiest = today.busiest_within(plan.longest_step_seconds / 60.0)
    steps = choose_steps(busiest, plan)
    return plan.model_copy(update={"steps": steps})


def _traffic(plan: CanaryPlan, before: Before) -> EndpointTraffic | None:
    """The traffic of the users or of the plan's own driver, whichever is more; None where it is unknown."""
    users = _of_users(before, plan)
    if plan.traffic is None:
        return users
    # An earlier rollout's driver may be in the last hour: the two are not added.
    rate = 60.0 * plan.traffic.requests_per_second
    if users is None:
        return EndpointTraffic(Today(rate), is_certain=True)
    if users.today.requests_per_minute >= rate:
        return users
    today = replace(users.today, requests_per_minute=rate, by_hour=())
    return EndpointTraffic(today, is_certain=True)


def _of_users(before: Before, plan: CanaryPlan) -> EndpointTraffic | None:
    users = _last_hour(before.series, plan) if before.series else None
    hours = [b.baseline for b in before.day.buckets[-HOURS:]] if before.day else []
    if before.day is None or len(hours) < HOURS:
        return users
    # Nothing in the last hour: a night, of which yesterday says when it ends.
    of_day = users or _last_hour(before.day, plan, timedelta(hours=HOURS))
    if of_day is None:
        return None
    now = users.today.requests_per_minute if users else 0.0
    counts = [t.requests + (t.cancelled or 0) + (t.refused or 0) for t in hours]
    # A deployment that has served for less than a day says nothing of the hours before.
    began = next((i for i, number in enumerate(counts) if number), HOURS)
    rates = (*[now] * began, *(number / 60.0 for number in counts[began:]))
    today = replace(of_day.today, requests_per_minute=now, by_hour=rates)
    return EndpointTraffic(today, of_day.is_certain)


def _last_hour(
    series: RolloutSeries, plan: CanaryPlan, within: timedelta = FROZEN_FROM
) -> EndpointTraffic | None:
    length = timedelta(seconds=plan.bucket_seconds)
    hour = [b for b in series.buckets if b.end > series.at - max(within, length)]
    busy = [b for b in hour if b.baseline.requests or b.baseline.cancelled or b.baseline.refused]
    if not busy:
        return None
    traffic = [bucket.baseline for bucket in busy]
    counted, answered = sum(t.requests for t in traffic), sum(t.answered for t in traffic)
    cancelled = sum(t.cancelled or 0 for t in traffic)
    refused = sum(t.refused or 0 for t in traffic)
    total = counted + cancelled + refused
    # An endpoint that began within the hour counts from its first request, not as idle before.
    span = hour[-1].end - (busy[0].end - length)
    today = Today(
        requests_per_minute=total / (span / timedelta(minutes=1)),
        # Each share is one of the requests that its gate judges.
        errors=_share(sum(t.errors for t in traffic), counted),
        blank=_share(sum(t.empty or 0 for t in traffic), answered),
        abandoned=_share(cancelled, total),
        refused=_share(refused, total - cancelled),
    )
    return EndpointTraffic(today, is_certain=span >= KNOWN_AFTER)


def _longest(plan: CanaryPlan) -> str:
    return f"{plan.longest_step_seconds / 3600.0:.3g} h"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _coarse(plan: CanaryPlan, before: Before) -> str:
    """Describe the limits of a server that publishes no detailed counts of times and lengths."""
    slow = plan.latency_gates.slow if plan.latency_gates else None
    hour = last_hour(before.series.buckets) if before.series else []
    if slow is None or before.series is None or not hour or all(arm.cells for arm in hour):
        return ""
    text = (
        "this server publishes no `latency.cells`, so medians and lengths of answers are not judged"
    )
    least = least_slowdown(before.series, slow.times)
    if least is None:
        return f"{text}, and slower answers by three quantiles only"
    return f"{text}, and answers that are less than {least:.2g} times slower cannot be told from the baseline's"


def _outrun_timeout(plan: CanaryPlan, before: Before) -> tuple[str, bool]:
    """Warn if a step can end before a hanging request times out; True if the plan must be refused for it.

    The text is empty where no step is that short.
    """
    timeout_s = before.answer.generate_timeout_seconds if before.answer else None
    step_s = plan.shortest_step_seconds
    if not timeout_s or step_s >= timeout_s:
        return "", False
    # A server that publishes the ages of open requests shows those that hang long before their time-out.
    if before.series is not None and before.series.in_flight.get("baseline") is not None:
        limits = before.usual.limits
        age_ms = max(HANGING_MS, HANGING_LIMITS * limits.very_slow_ms if limits else 0.0)
        return (
            f"a step may be over after {step_s:g} s, and the server ends a request only after {timeout_s:g} s; one"
            f" that hangs counts against its deployment after {age_ms / 1000:.3g} s"
        ), False
    return (
        f"a step may be over after {step_s:g} s, but the server ends a request only after"
        f" {timeout_s:g} s, so a candidate whose requests hang would be promoted before the first of them counts:"
        " raise `min_looks_per_step` or `look_every_seconds`, or lower the server's time-out"
    ), True
