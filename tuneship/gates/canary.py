"""One look at a rollout: (metrics, plan, record) -> one verdict with its reasons and numbers.

Pure; the clock is the service's. All is recomputed from the start at every look, so that a restart or a replay decides
the same bit by bit. Knows no HTTP and moves nothing: the flow acts on the `Look` and records it. `view.py` gathers what
is known at a look, `rules.py` decides.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from tuneship.gates.metrics.kept_buckets import pack
from tuneship.gates.metrics.metrics_reader import Metrics, read_series
from tuneship.gates.metrics.series import ARMS, RolloutSeries, Unusable
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Look, Phase, RolloutRecord, Verdict
from tuneship.gates.rules import Ruling, rule_on
from tuneship.gates.view import DeploymentState, States, View, make_view

AFTER_PROMOTION = frozenset({Phase.BAKE, Phase.SETTLE})
# Completion tokens per answer, as a multiple of the baseline's, above which a look warns: longer
# answers take longer, which is then the model's habit and no fault of the serving.
TOKEN_WARNING_RATIO = 1.2


@dataclass(frozen=True)
class Observed:
    """The metrics and states of both deployments as the flow read them for one look (None: the call failed)."""

    baseline_metrics: Metrics | None
    candidate_metrics: Metrics | None
    baseline: DeploymentState
    candidate: DeploymentState
    # A person has paused the rollout at the service.
    is_paused: bool = False


def decide(observed: Observed, plan: CanaryPlan, record: RolloutRecord) -> Look:
    """Read both answers and judge them; an answer that cannot be counted is a missing look, never an exception.

    The answers need not reach back further than the newest bucket that a look before has counted: the record has those.
    """
    states = States(observed.baseline, observed.candidate, observed.is_paused)
    try:
        kept = record.kept
        counted_until = kept.buckets[-1].end if kept.buckets else None
        both = observed.baseline_metrics, observed.candidate_metrics
        answer = read_series(*both, plan.interval, counted_until)
        series, new = kept.with_new(answer)
    except Unusable as unusable:
        return judge(str(unusable), states, plan, record)
    last = record.looks[-1].newest if record.looks else dict.fromkeys(ARMS)
    newest = {arm: max(filter(None, (answer.newest[arm], last[arm])), default=None) for arm in ARMS}
    series = replace(series, newest=newest)
    look = judge(series, states, plan, record)
    return look if look.missing else replace(look, kept=pack(new))


def judge(
    series: RolloutSeries | str,
    states: States,
    plan: CanaryPlan,
    record: RolloutRecord,
    recorded: Look | None = None,
) -> Look:
    """Judge a series that was read already, or a missing look with the reason why it is missing.

    `recorded`: a look that is decided again. Raises ValueError when the candidate has no traffic (before the first
    shift and after a rollback), and for a record of a release that this one does not know.
    """
    if record.phase is Phase.BEFORE:
        raise ValueError("the candidate has no traffic to be looked at")
    view = make_view(series, states, plan, record, recorded)
    return _look(view, rule_on(view))


def replay(record: RolloutRecord) -> Iterator[tuple[Look, Look]]:
    """Decide every look of a record again, from the buckets that it keeps. Yields each as recorded and as decided.

    Raises ValueError for a record whose plan or buckets cannot be read.
    """
    plan = CanaryPlan.model_validate(record.begun.plan)
    for i, look in enumerate(record.facts):
        if not isinstance(look, Look):
            continue
        before = RolloutRecord(record.facts[:i])
        kept = RolloutRecord(record.facts[: i + 1]).kept
        series = None
        if not look.missing and look.at is not None:
            series = RolloutSeries(kept.buckets, look.at, look.newest, kept.edges_ms)
        states = States(
            DeploymentState(look.baseline_status),
            DeploymentState(look.candidate_status, look.candidate_replicas),
            # Where a reason to stop came before the pause, the pause has decided nothing.
            look.is_paused,
        )
        decided = judge(series or str(look.missing), states, plan, before, look)
        yield look, replace(decided, kept=look.kept)


def first_difference(one: Look, other: Look) -> str | None:
    """Name the first field in which two looks differ, with both values; None if they are equal."""
    return None if one == other else _difference(one, other)


def _difference(one: Any, other: Any) -> str:
    names: Iterable[str] = getattr(one, "__dataclass_fields__", ())
    if {type(one), type(other)} == {tuple}:
        ours: tuple[Any, ...] = tuple(one)
        theirs: tuple[Any, ...] = tuple(other)
        found = next(i for i, pair in enumerate(zip_longest(ours, theirs)) if pair[0] != pair[1])
        beyond = (None,) * (found + 1)
        return f".{found}{_difference((*ours, *beyond)[found], (*theirs, *beyond)[found])}"
    if not names or type(one) is not type(other):
        return f": recorded {one}, decided {other}"
    name = next(name for name in names if getattr(one, name) != getattr(other, name))
    return f".{name}{_difference(getattr(one, name), getattr(other, name))}"


def _look(view: View, ruling: Ruling) -> Look:
    series, last = view.series, (view.record.looks[-1] if view.record.looks else None)
    advancing = ruling.verdict in (Verdict.ADVANCE, Verdict.PROMOTE)
    # A look without data carries on what the last one knew. An answer without a finished bucket leaves
    # the horizon where it was: it never moves back.
    horizon = last.horizon if last else None
    newest = last.newest if last else dict.fromkeys(ARMS)
    if series is not None:
        horizon, newest = series.horizon or horizon, series.newest
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
        step_traffic=view.step_traffic,
        needed=_needed(view, ruling),
        gates=view.gates,
        thresholds=view.thresholds,
        warnings=_warnings(view),
        plan_digest=view.record.begun.plan_hash,
        unequal_load=sum(
            not one.is_equal_load
            for one in view.measured[len(view.measured) - len(view.step_buckets) :]
        ),
    )


def _warnings(view: View) -> tuple[str, ...]:
    is_promoted = view.phase in AFTER_PROMOTION
    little_traffic = is_promoted and view.step_requests < view.plan.min_requests_per_step
    facts = [
        ("output_tokens", view.tokens is not None and view.tokens > TOKEN_WARNING_RATIO),
        ("baseline_broken", view.baseline_broken),
        ("low_traffic", little_traffic),
        # Before the promotion these are reasons to hold, not warnings.
        *((f"threshold:{reading.name}", is_promoted) for reading in view.above_thresholds),
    ]
    return tuple(name for name, applies in facts if applies)


def _needed(view: View, ruling: Ruling) -> str:
    """Describe what is still missing for a decision, in requests and looks as far as known."""
    if ruling.verdict is not Verdict.HOLD:
        return ""
    lacking = view.plan.min_requests_per_step - view.step_requests
    # A gate that holds or shows harm waits for a better candidate, and not for more requests.
    open_gates = [gate for gate in view.gates if gate.state == "open"]
    if "insufficient_data" not in ruling.reasons:
        wanted = [gate.requests_to_proof for gate in open_gates]
        if not any(reason.startswith("not_proven") for reason in ruling.reasons):
            return ""
        if None in wanted:
            return "not provable at the present rate"
        lacking = max(requests or 0 for requests in wanted)
    with_data = sum(look.brought_data for look in view.step_looks) + view.brought_data
    if not (view.step_requests and with_data):
        return f"{lacking} more requests"
    # Looks without new data bring no requests, so the rate is counted by those that did. Rounded up.
    looks = -(-lacking * with_data // view.step_requests)
    return f"{lacking} more requests, about {looks} looks"
