"""One look at a rollout: (metrics, plan, record) -> one verdict with its reasons and numbers.

Pure; the clock is the service's. The rules are tables of small functions, first match decides. All is recomputed from
the start at every look, so that a restart or a replay decides the same bit by bit. Knows no HTTP and moves nothing: the
flow acts on the `Look` and records it. `view.py` gathers what the rules look at.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from tuneship.gates import tallies
from tuneship.gates.plan import CanaryPlan, OutputLength
from tuneship.gates.record import Look, Phase, Probed, RolloutRecord, Verdict
from tuneship.gates.series import ARMS, Arm, ArmTraffic, Json, RolloutSeries, Unusable, read_series
from tuneship.gates.view import (
    BREAKER_REQUESTS,
    BREAKER_SHARE,
    DeploymentState,
    View,
    error_share,
    make_view,
)

AFTER_PROMOTION = frozenset({Phase.BAKE, Phase.SETTLE})
# Deployment states from which nothing comes back; `missing` stands for a 404.
GONE = frozenset({"deleting", "deleted", "missing"})
BREAKER_BASELINE = 0.1
# Beyond this share it does not matter who the callers are.
BREAKER_ALL = 0.9
TOKEN_WARNING = 1.2


@dataclass(frozen=True)
class Observed:
    """What the flow asked for one look: raw metrics answers (None: the call failed) and both deployments."""

    baseline_metrics: Json | None
    candidate_metrics: Json | None
    baseline: DeploymentState
    candidate: DeploymentState


def decide(observed: Observed, plan: CanaryPlan, record: RolloutRecord) -> Look:
    """One look. Reads both answers and judges; a bad answer is a missing look, never an exception."""
    try:
        series = read_series(observed.baseline_metrics, observed.candidate_metrics, plan.interval)
    except Unusable as unusable:
        return judge(str(unusable), observed.baseline, observed.candidate, plan, record)
    return judge(series, observed.baseline, observed.candidate, plan, record)


def judge(
    series: RolloutSeries | str,
    baseline: DeploymentState,
    candidate: DeploymentState,
    plan: CanaryPlan,
    record: RolloutRecord,
    recorded: Look | None = None,
) -> Look:
    """`decide` on a series that was read already, or on the reason why there is none.

    `recorded`: a look that is decided again. Raises ValueError when the candidate has no traffic (before the first
    shift and after a rollback), and for a record of a release that this one does not know.
    """
    if record.phase is Phase.BEFORE:
        raise ValueError("the candidate has no traffic to be looked at")
    view = make_view(series, baseline, candidate, plan, record, recorded)
    rules = LIVE_BAKE if view.phase is Phase.BAKE and view.has_baseline else RULES[view.phase]
    ruling = next(ruling for rule in rules if (ruling := rule(view)))
    return _look(view, _with_safe_return(view, ruling))


def replay(record: RolloutRecord, series: RolloutSeries, plan: CanaryPlan) -> list[Look]:
    """Every look of the record decided again from the final series, cut at each look's horizon."""
    looks: list[Look] = []
    for i, fact in enumerate(record.facts):
        if not isinstance(fact, Look):
            continue
        newest: dict[Arm, datetime | None] = {
            "baseline": fact.newest_baseline,
            "candidate": fact.newest_candidate,
        }
        cut = replace(
            series, buckets=series.until(fact.horizon), at=fact.at or series.at, newest=newest
        )
        looks.append(
            judge(
                fact.missing or cut,
                DeploymentState(fact.baseline_status),
                DeploymentState(fact.candidate_status, fact.candidate_replicas),
                plan,
                RolloutRecord(record.facts[:i]),
                fact,
            )
        )
    return looks


@dataclass(frozen=True)
class Ruling:
    """What a rule decides, for the result's `reason` and all reasons of a hold."""

    verdict: Verdict
    reason: str = "none"
    reasons: tuple[str, ...] = ()


def candidate_gone(view: View) -> Ruling | None:
    if view.candidate.status == "failed" or view.candidate.status in GONE:
        return Ruling(Verdict.ROLLBACK, "candidate_failed", ("candidate_failed",))
    return None


def baseline_gone(view: View) -> Ruling | None:
    if view.baseline.status in GONE:
        return Ruling(Verdict.ABORT, "baseline_missing", ("baseline_missing",))
    return None


def circuit_breaker(view: View) -> Ruling | None:
    """Half of a bucket fails while the baseline is fine: no statistics needed."""
    pooled = error_share(view.span.compared, "baseline")
    buckets = view.span.compared if view.has_baseline else view.span.baked
    broken = any(
        _half_fails(b.candidate, by_caller=view.formula >= 2)
        and (error_share([b], "baseline") if b.baseline.requests else pooled) < BREAKER_BASELINE
        for b in buckets
    )
    if broken or _probes_say_broken(view):
        return Ruling(Verdict.ROLLBACK, "error_rate", ("circuit_breaker",))
    return None


def _half_fails(traffic: ArmTraffic, *, by_caller: bool) -> bool:
    """At least half of 20 or more requests. A caller who repeats a failing request does not make it half of them."""
    requests, errors = traffic.requests, traffic.errors
    nearly_all = requests >= BREAKER_REQUESTS and errors >= BREAKER_ALL * requests
    if by_caller and traffic.error_callers is not None and not nearly_all:
        requests, errors = requests - errors + traffic.error_callers, traffic.error_callers
    return requests >= BREAKER_REQUESTS and errors >= BREAKER_SHARE * requests


def _probes_say_broken(view: View) -> bool:
    """All of the last 20 or more probes to the candidate failed, while those to the baseline worked."""
    start = view.record.step_marks()[view.weight].looks
    probes = [
        fact
        for fact, mark in view.record.marked()
        if isinstance(fact, Probed) and mark.looks >= start
    ]
    asked = failed = worked = 0
    for probe in reversed(probes):
        asked += probe.candidate_requests
        failed += probe.candidate_failed
        worked += probe.baseline_requests - probe.baseline_failed
        if asked >= BREAKER_REQUESTS:
            return failed == asked and (worked > 0 or not view.has_baseline)
    return False


def harm_shown(view: View) -> Ruling | None:
    harmful = [gate for gate in view.gates if gate.state == "harm"]
    if not harmful:
        return None
    return Ruling(
        Verdict.ROLLBACK, harmful[0].reason, tuple(f"harm:{gate.name}" for gate in harmful)
    )


def threshold_passed(view: View) -> Ruling | None:
    """Only where the plan asks for plain thresholds: no evidence, no baseline, no promise about noise."""
    above, wanted = view.above_thresholds, view.plan.thresholds
    if not above or wanted is None or wanted.action == "hold":
        return None
    reasons = tuple(f"threshold:{one.name}" for one in above)
    return Ruling(Verdict.ROLLBACK, above[0].reason, reasons)


def metrics_gone(view: View) -> Ruling | None:
    if view.missing_in_a_row >= view.plan.missing_looks:
        return Ruling(Verdict.ROLLBACK, "metrics_unavailable", ("metrics_unavailable",))
    return None


def looks_used_up(view: View) -> Ruling | None:
    looks = [look for look in view.record.since_resumed() if look.phase is view.phase]
    at_step = sum(look.weight == view.weight for look in looks) + 1
    if at_step < view.plan.max_looks_per_step and len(looks) + 1 < view.plan.max_looks:
        return None
    return _inconclusive(view)


def _inconclusive(view: View) -> Ruling:
    """What the plan says of a rollout that came to no end in its looks, with what held it."""
    holding = next((gate.reason for gate in view.gates if gate.state == "hold"), None)
    if holding is None and view.above_thresholds:
        holding = view.above_thresholds[0].reason
    if holding is None and _length_holds(view):
        holding = "quality"
    if holding is None and view.split_mismatches:
        holding = "split_mismatch"
    if holding is None:
        holding = "baseline_unhealthy" if view.baseline_unhealthy else "insufficient_data"
    verdict = Verdict.PAUSE if view.plan.on_inconclusive == "pause" else Verdict.ROLLBACK
    return Ruling(verdict, holding, ("max_looks", *_hold_reasons(view)))


def held(view: View) -> Ruling | None:
    reasons = _hold_reasons(view)
    return Ruling(Verdict.HOLD, reasons=reasons) if reasons else None


def _hold_reasons(view: View) -> tuple[str, ...]:
    pending = view.limits is None and any(
        gate.name in tallies.LATENCY_GATES and gate.state not in ("disabled", "not_evaluated")
        for gate in view.gates
    )
    stale = view.standing and view.missing_in_a_row >= view.plan.stale_looks
    facts = [
        *((f"early_warning:{gate.name}", gate.state == "hold") for gate in view.gates),
        *((f"not_evaluated:{gate.name}", gate.state == "not_evaluated") for gate in view.gates),
        *((f"threshold:{one.name}", True) for one in view.above_thresholds),
        ("quality", _length_holds(view)),
        ("split_mismatch", view.split_mismatches),
        ("metrics_missing", view.missing is not None),
        ("metrics_stale", stale),
        ("no_new_data", view.missing is None and not view.brought_data),
        ("insufficient_data", view.step_requests < view.plan.min_requests_per_step),
        ("latency_limits_pending", pending),
        ("candidate_not_running", not _is_running(view.candidate)),
        ("baseline_not_running", view.baseline.status != "running"),
        ("baseline_unhealthy", view.baseline_unhealthy or view.baseline_broken),
    ]
    return tuple(reason for reason, applies in facts if applies)


def _is_running(deployment: DeploymentState) -> bool:
    return deployment.status == "running" and (
        deployment.replicas is None or deployment.replicas >= 1
    )


def _length_holds(view: View) -> bool:
    """Answers of another length than the baseline's, where nobody said that this is meant."""
    is_first = view.formula < 2
    bounds = _FIRST_BOUNDS if is_first else view.plan.output_length
    if bounds is None or view.tokens is None:
        return False
    latency = view.plan.latency_gates
    is_meant = latency is not None and latency.per_output_token
    no_source = any(gate.name == "empty" and gate.state == "not_available" for gate in view.gates)
    if not no_source and (is_meant or is_first):
        return False
    requests = sum(bucket.candidate.requests for bucket in view.span.compared)
    is_longer = view.tokens > bounds.longest and not is_first
    return requests >= bounds.min_requests and (view.tokens < bounds.shortest or is_longer)


# Formula version 1 knew the lower bound only, and used it where nothing counted blank answers.
_FIRST_BOUNDS = OutputLength()


def dwell(view: View) -> Ruling | None:
    looks = sum(look.brought_data for look in view.step_looks) + view.brought_data
    if looks < view.plan.min_looks_per_step:
        return Ruling(Verdict.HOLD, reasons=("dwell",))
    return None


def advance(view: View) -> Ruling | None:
    """No proof is needed for a bounded exposure: nothing speaks against it."""
    if view.next_weight in view.plan.compared_steps:
        return Ruling(Verdict.ADVANCE)
    return None


def unproven(view: View) -> Ruling | None:
    open_gates = [gate.name for gate in view.gates if gate.state == "open"]
    if open_gates:
        return Ruling(Verdict.HOLD, reasons=tuple(f"not_proven:{name}" for name in open_gates))
    if view.above_objective:
        return Ruling(Verdict.HOLD, reasons=("baseline_unhealthy",))
    return None


def ask_or_promote(view: View) -> Ruling:
    return Ruling(Verdict.ASK if view.plan.approval == "required" else Verdict.PROMOTE)


def refused(view: View) -> Ruling | None:
    answer = view.record.answer
    if answer is None or answer.decision == "promote":
        return None
    reason = "approval_timeout" if answer.decision == "timeout" else "human_rejected"
    return Ruling(Verdict.ROLLBACK, reason, (reason,))


def unanswered(view: View) -> Ruling | None:
    if view.record.answer is None:
        return Ruling(Verdict.HOLD, reasons=("approval",))
    return None


def approved(_: View) -> Ruling:
    return Ruling(Verdict.PROMOTE)


def _sound_looks(view: View) -> int:
    """Looks of this phase with usable metrics, this one included."""
    before = sum(look.phase is view.phase and not look.is_missing for look in view.record.looks)
    return before + (not view.is_missing)


def baking(view: View) -> Ruling:
    """Looks with usable metrics count; little traffic is reported, and is no failure."""
    if _sound_looks(view) < view.plan.bake_looks or view.is_missing:
        return Ruling(Verdict.HOLD, reasons=("baking",))
    return Ruling(Verdict.BAKED)


def still_baking(view: View) -> Ruling | None:
    """Before the bake's looks are over nothing but harm ends it, least of all a maximum of looks."""
    if _sound_looks(view) < view.plan.bake_looks:
        return Ruling(Verdict.HOLD, reasons=("baking",))
    return None


def take_the_rest(view: View) -> Ruling:
    """All traffic while everything is still proven; what stays unproven for another step's looks is inconclusive."""
    waiting = held(view) or unproven(view)
    if waiting is None:
        return Ruling(Verdict.ADVANCE)
    if _sound_looks(view) >= view.plan.bake_looks + view.plan.max_looks_per_step:
        return _inconclusive(view)
    return waiting


def settling(view: View) -> Ruling:
    """The bake is passed: a few looks at 100 % show that the candidate carries it all."""
    if _sound_looks(view) < view.plan.settle_looks or view.is_missing:
        return Ruling(Verdict.HOLD, reasons=("settling",))
    return Ruling(Verdict.BAKED)


Rule = Callable[[View], Ruling | None]
# What ends a rollout first, wherever both deployments answer.
BESIDE_THE_BASELINE: tuple[Rule, ...] = (
    candidate_gone,
    baseline_gone,
    circuit_breaker,
    harm_shown,
    threshold_passed,
    metrics_gone,
)
RULES: dict[Phase, tuple[Rule, ...]] = {
    Phase.COMPARE: (
        *BESIDE_THE_BASELINE,
        looks_used_up,
        held,
        dwell,
        advance,
        unproven,
        ask_or_promote,
    ),
    Phase.WAIT: (
        *BESIDE_THE_BASELINE,
        refused,
        unanswered,
        held,
        unproven,
        approved,
    ),
    Phase.BAKE: (
        candidate_gone,
        circuit_breaker,
        harm_shown,
        threshold_passed,
        metrics_gone,
        baking,
    ),
    Phase.SETTLE: (candidate_gone, circuit_breaker, metrics_gone, settling),
}
# The bake below 100 %: the baseline still answers, so all is compared as before.
LIVE_BAKE: tuple[Rule, ...] = (*BESIDE_THE_BASELINE, still_baking, take_the_rest)
_EVEN_TO_A_BROKEN_BASELINE = frozenset({"candidate_failed", "human_rejected"})


def _with_safe_return(view: View, ruling: Ruling) -> Ruling:
    """A rollback needs a baseline that can take the traffic; where it cannot, stop or leave it to a person."""
    if ruling.verdict not in (Verdict.ROLLBACK, Verdict.PAUSE):
        return ruling
    if view.baseline.status in GONE:
        return Ruling(Verdict.ABORT, "baseline_missing", (*ruling.reasons, "baseline_missing"))
    if view.baseline_broken and ruling.reason not in _EVEN_TO_A_BROKEN_BASELINE:
        return Ruling(Verdict.PAUSE, "baseline_unhealthy", (*ruling.reasons, "baseline_broken"))
    return ruling


def _look(view: View, ruling: Ruling) -> Look:
    series, last = view.series, (view.record.looks[-1] if view.record.looks else None)
    advancing = ruling.verdict in (Verdict.ADVANCE, Verdict.PROMOTE)
    if series is not None:
        horizon = series.horizon or (last.horizon if last else None)
        newest = series.newest
        unvalued = {arm: series.unvalued(arm, horizon) for arm in ARMS}
    else:  # nothing was learnt: carry on what was known
        horizon = last.horizon if last else None
        newest = {
            "baseline": last.newest_baseline if last else None,
            "candidate": last.newest_candidate if last else None,
        }
        unvalued = {
            "baseline": last.unvalued_baseline if last else 0,
            "candidate": last.unvalued_candidate if last else 0,
        }
    return Look(
        number=len(view.record.looks) + 1,
        phase=view.phase,
        weight=view.weight,
        verdict=ruling.verdict,
        at=series.at if series else (last.at if last else None),
        horizon=horizon,
        missing=view.missing,
        standing=view.standing,
        step_buckets=len(view.step_buckets),
        brought_data=view.brought_data,
        newest_baseline=newest["baseline"],
        newest_candidate=newest["candidate"],
        unvalued_baseline=unvalued["baseline"],
        unvalued_candidate=unvalued["candidate"],
        limits=view.limits,
        hanging_baseline=view.hanging.get("baseline", ()),
        hanging_candidate=view.hanging.get("candidate", ()),
        baseline_status=view.baseline.status,
        candidate_status=view.candidate.status,
        candidate_replicas=view.candidate.replicas,
        reason=ruling.reason,
        reasons=ruling.reasons,
        next_weight=view.next_weight if advancing else None,
        step_requests=view.step_requests,
        needed=_needed(view, ruling),
        gates=view.gates,
        thresholds=view.thresholds,
        warnings=_warnings(view),
        plan_digest=view.plan.digest(),
        series_digest=series.digest() if series else None,
        formula_version=str(view.formula),
    )


def _warnings(view: View) -> tuple[str, ...]:
    facts = [
        ("output_tokens", view.tokens is not None and view.tokens > TOKEN_WARNING),
        ("baseline_broken", view.baseline_broken),
        (
            "low_traffic",
            view.phase in AFTER_PROMOTION and view.step_requests < view.plan.min_requests_per_step,
        ),
    ]
    above = view.above_thresholds if view.phase in AFTER_PROMOTION else ()  # else it is a reason
    return (
        *(name for name, applies in facts if applies),
        *(f"threshold:{one.name}" for one in above),
    )


def _needed(view: View, ruling: Ruling) -> str:
    """What a hold waits for, in requests and looks as far as they can be told."""
    if ruling.verdict is not Verdict.HOLD:
        return ""
    lacking = view.plan.min_requests_per_step - view.step_requests
    open_gates = [gate for gate in view.gates if gate.state == "open"]
    if "insufficient_data" not in ruling.reasons:
        wanted = [gate.requests_to_proof for gate in open_gates]
        if not any(reason.startswith("not_proven") for reason in ruling.reasons):
            return ""
        if None in wanted:
            return "not provable at the present rate"
        lacking = max(one or 0 for one in wanted)
    with_data = sum(look.brought_data for look in view.step_looks) + view.brought_data
    if not (view.step_requests and with_data):
        return f"{lacking} more requests"
    looks = -(-lacking * with_data // view.step_requests)
    return f"{lacking} more requests, about {looks} looks"
