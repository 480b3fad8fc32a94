"""Sentences for people for the gates' short words: reasons, gates, states. A test requires one for every word.

Pure. Next: `flows/rollout/page.py` and `flows/release/reports/report.py` show them.
"""

from collections.abc import Iterable, Mapping, Sequence

from tuneship.contract.common import count
from tuneship.gates.gate_types import GateReading
from tuneship.gates.outlook import (
    DOUBLING,
    INSUFFICIENT_DATA,
    UNHEALTHY_BASELINE,
    Forecast,
    Today,
)
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Begun, Look, Probed, RolloutRecord, SplitConfirmed

REASONS: Mapping[str, str] = {
    # why a rollout ended
    "candidate_failed": "the candidate's deployment failed or is gone",
    "baseline_missing": "the old deployment is gone, so there is nothing to return to",
    "error_rate": "the candidate fails more requests than the plan allows",
    "crash": "far more of the candidate's requests failed in one bucket than chance and the plan allow",
    "latency": "the candidate is slower than the plan allows",
    "quality": "the candidate's answers are worse, or of another length, than the plan allows",
    "abandoned_requests": "more callers disconnect from the candidate than the plan allows",
    "refused_requests": "the candidate refuses requests that the baseline takes",
    "metrics_unavailable": "there were no usable metrics for too many checks",
    "split_mismatch": "requests of the candidate vanish: it counts fewer than its share of the traffic",
    "baseline_unhealthy": "the baseline fails more often than `slo_max` allows, so nothing can be compared with it",
    "insufficient_data": "too few requests for a decision",
    "approval_timeout": "nobody answered in time",
    "human_rejected": "a person said no, or rolled it back",
    # why a look holds, or what it goes by
    "few_callers": "half of the traffic is from so few callers that their faults would look like the candidate's",
    "max_looks": "the plan's checks are used up without a decision",
    "metrics_missing": "this check had no usable metrics",
    "metrics_stale": "the metrics have not changed for too long",
    "no_new_data": "nothing new since the last check",
    "latency_limits_pending": "too few answers of the baseline to set the latency limits",
    "candidate_not_running": "the candidate is not running",
    "baseline_not_running": "the baseline is not running",
    "dwell": "the step has not had its minimum number of checks",
    "approval": "a person is asked",
    "paused": "a person has paused the rollout",
    "baking": "the bake (the soak at a high share) continues",
    "settling": "the candidate has all traffic and is watched for a few checks more",
    "circuit_breaker": "half of the candidate's requests failed at once, a caller who repeats them counted once",
    "baseline_broken": "the baseline itself fails half of its requests, so nothing is returned to it",
    # what the pipeline refuses, or stops for
    "too_little_traffic": "today's traffic is too little for a promotion within the plan's checks",
    "shorter_than_timeout": "a step is shorter than the server's time-out, so requests that hang would not count",
    "rollout_in_progress": "another rollout of this endpoint is running",
    "foreign_change": "somebody else set the split",
    "lease_expired": "the service gave the traffic back to the baseline by itself, because nobody renewed the lease",
    "shift_unconfirmed": "a change of the split could not be confirmed",
    "record_not_writable": "the record could not be written, and nothing moves without one",
    "record_damaged": "the record of an earlier rollout cannot be read",
    # warnings
    "output_tokens": "the candidate's answers are more than 1.2 times as long as the baseline's",
    "low_traffic": "so few requests that the bake shows little",
}
# Reasons of the form `word:name`.
OF_A_GATE: Mapping[str, str] = {
    "early_warning": "{} looks worse for the candidate, which is not proof",
    "not_evaluated": "{} has no limits in the plan",
    "not_proven": "{} is not proven to be within its limit",
    "harm": "{} is shown to be beyond its limit",
    "threshold": "{} is above its plain threshold",
}
# What a gate's bad requests did.
BAD: Mapping[str, str] = {
    "error": "failed",
    "typical": "took longer than the baseline's median",
    "slow": "took longer than the baseline's p95",
    "very_slow": "took longer than 1.5 x the baseline's p99",
    "empty": "had a blank answer",
    "short": "had an answer shorter than nearly all of the baseline's",
    "long": "had an answer longer than nearly all of the baseline's",
    "length": "had an answer that was cut off at the token limit",
    "repetition": "had an answer that repeats itself",
    "invalid_json": "had an answer that is not JSON",
    "abandoned": "were given up by their callers",
    "refused": "were refused by the deployment itself",
}
# What the forecast finds that a plan cannot show at this traffic, beside the gates that it cannot prove.
CANNOT: Mapping[str, str] = {
    UNHEALTHY_BASELINE: "cannot promote an equal candidate",
    INSUFFICIENT_DATA: "cannot end a step",
    DOUBLING: "cannot promise to find twice the errors",
}
STATES: Mapping[str, str] = {
    "harm": "beyond the limit",
    "hold": "worse than the baseline so far, which is not proof",
    "open": "not decided",
    "proven": "proven to be within the limit",
    "not_evaluated": "the plan gives it no limits",
    "not_available": "nobody counts it",
    "disabled": "switched off",
}
WHY_OFF: Mapping[str, str] = {
    "disabled": "the plan switches it off",
    "not_available": "it counts answers, and neither the service nor a traffic driver of the plan reports them",
    "not_evaluated": "the plan gives it no limits",
}
OUTCOMES: Mapping[str, str] = {
    "promoted": "The new model serves all traffic.",
    "rolled_back": "The traffic went back to the model that served before.",
    "rejected": "The new model got no traffic.",
    "paused": "The split is frozen until a person decides.",
    "aborted": "The run was stopped.",
    "rollback_incomplete": "The traffic could not be returned: look at the endpoint now.",
}


def in_words(reason: str) -> str:
    """Put a reason into words; an unknown one, such as that of an older record, stays as it is."""
    kind, _, name = reason.partition(":")
    if name:
        return OF_A_GATE[kind].format(f"`{name}`") if kind in OF_A_GATE else reason
    return REASONS.get(reason, reason)


def all_in_words(reasons: Iterable[str]) -> str:
    """Put several reasons into words."""
    return "; ".join(map(in_words, reasons))


def gates_in_words(gates: Sequence[GateReading]) -> list[str]:
    """Put each gate's counts into words; gates without requests are left out."""
    sentences: list[str] = []
    for gate in gates:
        if gate.candidate_requests or gate.baseline_requests:
            candidate = _share(gate.candidate_bad, gate.candidate_requests)
            baseline = _share(gate.baseline_bad, gate.baseline_requests)
            seen = f"{candidate} of the candidate's requests {BAD.get(gate.name, 'were bad')}"
            state = STATES[gate.state]
            sentences.append(f"`{gate.name}`: {seen}, {baseline} of the baseline's: {state}")
    return sentences


def _share(bad: int, requests: int) -> str:
    return f"{bad} of {requests} ({100 * bad / requests:.2f} %)" if requests else "none"


def look_in_words(look: Look) -> list[str]:
    """Put the rest of a look into words: its reasons, hanging requests, warnings."""
    reasons = [look.reason, *look.reasons] if look.reason != "none" else look.reasons
    sentences = [all_in_words(dict.fromkeys(reasons))] if reasons else []
    hanging = sum(look.hanging_candidate), sum(look.hanging_baseline)
    if any(hanging):
        sentences.append(
            f"{count(hanging[0], 'request')} of the candidate and {hanging[1]} of the baseline had been open "
            "for too long"
        )
    return [*sentences, *(f"warning: {in_words(warning)}" for warning in look.warnings)]


def driver_in_words(record: RolloutRecord) -> str | None:
    """Put the driver's counts into words; None without a driver."""
    sent = driven(record)
    if not sent:
        return None
    lost = f"{sent['unanswered']} ended before anybody said who served them"
    if sent["unanswered"]:
        lost += (
            f" (by weight {sent['unanswered_candidate']:.3g} of the candidate's and"
            f" {sent['unanswered_baseline']:.3g} of the baseline's)"
        )
    return (
        f"The pipeline's own requests: {sent['candidate']} to the candidate, {sent['baseline']} to the baseline;"
        f" {sent['abandoned_candidate']} and {sent['abandoned_baseline']} broke off in the answer; {lost}"
    )


def driven(record: RolloutRecord) -> dict[str, int | float]:
    """Sum the driver's counts over the rollout; empty without a driver. Unanswered requests are divided by weight."""
    counts: dict[str, int | float] = {}
    share = 0.0
    for fact in record.facts:
        if isinstance(fact, Probed):
            for name, number in (
                ("candidate", fact.candidate_requests),
                ("baseline", fact.baseline_requests),
                ("abandoned_candidate", fact.candidate_abandoned),
                ("abandoned_baseline", fact.baseline_abandoned),
                ("unanswered", fact.unanswered),
                ("unanswered_candidate", fact.unanswered * share),
                ("unanswered_baseline", fact.unanswered * (1.0 - share)),
            ):
                counts[name] = counts.get(name, 0) + number
        elif isinstance(fact, SplitConfirmed):
            share = fact.candidate_weight / 100.0
    return counts


def forecast_in_words(begun: Begun) -> list[str]:
    """Put the forecast of a rollout into words; empty for one that began without."""
    forecast, today = begun.forecast, begun.today
    if forecast is None or today is None:
        return []
    rate = rate_in_words(today)
    if forecast.promote_minutes is None:
        sentences = [f"at {rate} an equal candidate is not expected to be promoted"]
        if forecast.promoted and forecast.slowest_minutes:
            sentences[0] += f" ({_share_promoted(forecast)})"
    else:
        plan = CanaryPlan.model_validate(begun.plan)
        looks = plan.bake_looks + (plan.settle_looks if plan.bake_weight else 0)
        # A look of the bake counts only with new data, so it lasts as long as a bucket at least.
        bake = _minutes(looks * plan.data_every_seconds / 60.0)
        half, most = forecast.promote_minutes, forecast.promote_minutes_most
        text = f"at {rate} about {_minutes(half)} to promote an equal candidate"
        if forecast.promoted < forecast.drawn:
            text += f" ({_share_promoted(forecast)})"
        else:
            text += _nine_of_ten(half, most)
        sentences = [f"{text}, then {bake} of bake"]
    for what, half, most in (
        ("a doubling of errors is", forecast.doubling_minutes, forecast.doubling_minutes_most),
        (
            "five points more errors are",
            forecast.more_errors_minutes,
            forecast.more_errors_minutes_most,
        ),
    ):
        if half is not None:
            sentences.append(f"{what} found within {_minutes(half)}{_nine_of_ten(half, most)}")

    gates = [finding.what for finding in forecast.unprovable if finding.what not in CANNOT]
    if gates:  # they all have one problem, so they share a sentence
        names = ", ".join(gates)
        sentences.append(f"cannot prove {names}: too few requests within the plan's checks")
    for finding in forecast.unprovable:
        if finding.what in CANNOT:
            sentences.append(f"{CANNOT[finding.what]}: {finding.why}")
    return sentences


def _share_promoted(forecast: Forecast) -> str:
    """Say how many simulated candidates were promoted, and how the other rollouts ended."""
    back = forecast.drawn - forecast.promoted - forecast.undecided
    text = f"{forecast.promoted} of {forecast.drawn} within {_minutes(forecast.slowest_minutes or 0.0)}"
    for number, end in ((forecast.undecided, "undecided"), (back, "rolled back")):
        if number:
            text += f"; {number} {'ends' if number == 1 else 'end'} {end}"
    return text


def _nine_of_ten(half: float, most: float | None) -> str:
    return f" (nine of ten within {_minutes(most)})" if most is not None and most > half else ""


def rate_in_words(today: Today) -> str:
    """Put the endpoint's traffic into words."""
    text = _rate(today.requests_per_minute)
    busiest = max(today.by_hour, default=0.0)
    # A night says nothing about the morning that a rollout may wait for.
    if busiest > 2 * today.requests_per_minute:
        text += f" now and {_rate(busiest)} in the busiest hour of a day"
    return text


def _rate(rate: float) -> str:
    shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    return f"{shown} {'request' if shown == '1' else 'requests'} a minute"


def _minutes(minutes: float) -> str:
    if minutes < 2:
        return count(round(60 * minutes), "second")
    if minutes < 180:
        return f"{round(minutes)} minutes"
    return f"{minutes / 60:.1f} hours"
