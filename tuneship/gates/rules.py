"""The rules of a look, as tables of small functions by phase: the first applicable rule decides.

Each takes the `View` of one look and returns a `Ruling`, or None where it does not apply. Next: `canary.py` writes the
ruling into a `Look`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from tuneship.gates import tallies
from tuneship.gates.record import PAUSED, Phase, Probed, Verdict
from tuneship.gates.statistics.evidence import BucketCounts
from tuneship.gates.statistics.gate_limits import CrashRule
from tuneship.gates.view import BREAKER_REQUESTS, BREAKER_SHARE, View, error_share

# Deployment states from which nothing comes back; `missing` stands for a 404.
GONE = frozenset({"deleting", "deleted", "missing"})
# The breaker blames the candidate only while a smaller share of the baseline's requests fails.
BREAKER_BASELINE_SHARE = 0.1
# Beyond this share of errors it does not matter who the callers are.
BREAKER_NEARLY_ALL_SHARE = 0.9
# The crash rule: the baseline's requests that it needs, the margin, and how rarely a candidate at the
# margin may look like this in a minute.
CRASH_BASELINE_REQUESTS, CRASH_RATIO, CRASH_CHANCE = 10, 1.5, 0.02


@dataclass(frozen=True)
class Ruling:
    """The verdict of a rule, with the result's `reason` and all reasons of a hold."""

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
    """Roll back when half of a bucket fails while the baseline is fine: that needs no statistics."""
    broken = Ruling(Verdict.ROLLBACK, "error_rate", ("circuit_breaker",))
    for bucket in view.new_buckets:
        requests, errors = bucket.candidate.requests, bucket.candidate.errors
        callers = bucket.candidate.error_callers
        nearly_all = requests >= BREAKER_REQUESTS and errors >= BREAKER_NEARLY_ALL_SHARE * requests
        # One caller who repeats a failing request counts once, or it alone could make half of them.
        if callers is not None and not nearly_all:
            requests, errors = requests - errors + callers, callers
        if requests >= BREAKER_REQUESTS and errors >= BREAKER_SHARE * requests:
            # An outage that both share is no reason to go back. At 100 % the baseline has no traffic
            # to compare with, and the time before has to do.
            beside = [bucket] if bucket.baseline.requests else view.span.compared
            if error_share(beside, "baseline") < BREAKER_BASELINE_SHARE:
                return broken
    return broken if _probes_say_broken(view) else None


def crashed(view: View) -> Ruling | None:
    """Roll back for one bucket in which the candidate fails far more often than a shared incident explains."""
    rule = view.plan.crash
    for bucket in view.new_buckets if rule and view.has_baseline else ():
        errors = BucketCounts(
            bucket.candidate.requests,
            bucket.candidate.errors,
            bucket.baseline.requests,
            bucket.baseline.errors,
        )
        errors = tallies.one_per_caller(bucket.candidate.error_callers, errors)
        if rule and is_crash(errors, rule):
            return Ruling(Verdict.ROLLBACK, "crash", ("crash",))
    return None


def is_crash(errors: BucketCounts, rule: CrashRule) -> bool:
    """Whether the candidate alone fails so often that one bucket decides. Not part of alpha: `docs/gates.md` has its
    error rate.
    """
    n_c, x_c, n_b, x_b = errors[:4]
    if x_c < rule.failures or x_c < rule.share * n_c:
        return False
    if n_b < CRASH_BASELINE_REQUESTS or x_b > BREAKER_BASELINE_SHARE * n_b:
        return False
    # At the margin of 1.5 times the baseline's share, each failure is the baseline's with this chance.
    share = n_b / (CRASH_RATIO * n_c + n_b)
    bad = x_c + x_b
    chance = math.fsum(
        math.comb(bad, k) * share**k * (1.0 - share) ** (bad - k) for k in range(x_b + 1)
    )
    return chance <= CRASH_CHANCE


def _probes_say_broken(view: View) -> bool:
    """Whether the last 20 or more probes of the candidate all failed while those of the baseline worked."""
    # Probes of an earlier step met the candidate at another load.
    start = view.record.step_marks()[view.weight].looks
    probes = [
        fact
        for fact, mark in view.record.marked()
        if isinstance(fact, Probed) and mark.looks >= start
    ]
    sent = failed = worked = 0
    for probe in reversed(probes):
        sent += probe.candidate_requests
        failed += probe.candidate_failed
        worked += probe.baseline_requests - probe.baseline_failed
        # Newest first, and no further back than needed: an outage that has passed must not count.
        if sent >= BREAKER_REQUESTS:
            return failed == sent and (worked > 0 or not view.has_baseline)
    return False


def harm_shown(view: View) -> Ruling | None:
    harmful = [gate for gate in view.gates if gate.state == "harm"]
    if not harmful:
        return None
    return Ruling(
        Verdict.ROLLBACK, harmful[0].reason, tuple(f"harm:{gate.name}" for gate in harmful)
    )


def threshold_passed(view: View) -> Ruling | None:
    """Roll back when a plain threshold of the plan is exceeded: without evidence, a baseline or a promise about
    noise.
    """
    above, wanted = view.above_thresholds, view.plan.thresholds
    if not above or wanted is None or wanted.action == "hold":
        return None
    reasons = tuple(f"threshold:{reading.name}" for reading in above)
    return Ruling(Verdict.ROLLBACK, above[0].reason, reasons)


def metrics_gone(view: View) -> Ruling | None:
    if view.missing_in_a_row >= view.plan.missing_looks:
        return Ruling(Verdict.ROLLBACK, "metrics_unavailable", ("metrics_unavailable",))
    return None


def _inconclusive(view: View) -> Ruling:
    """End a rollout without a decision after its last look, as the plan says, and name the gate that held it."""
    # The first that applies: what speaks against the candidate, before what is merely missing.
    holding = next((gate.reason for gate in view.gates if gate.state == "hold"), None)
    if holding is None and view.above_thresholds:
        holding = view.above_thresholds[0].reason
    if holding is None and _length_holds(view):
        holding = "quality"
    if holding is None and view.split_mismatches:
        holding = "split_mismatch"
    if holding is None:
        holding = "baseline_unhealthy" if view.baseline_unhealthy else "insufficient_data"

    # Nothing was shown against the candidate, and the baseline is plainly sick: a person decides.
    asks = view.plan.on_inconclusive == "pause" or view.baseline_unhealthy
    verdict = Verdict.PAUSE if asks else Verdict.ROLLBACK
    return Ruling(verdict, holding, ("max_looks", *_hold_reasons(view)))


def paused_by_person(view: View) -> Ruling | None:
    """Hold while a person has paused the rollout, however many looks that takes."""
    if not view.is_paused:
        return None
    return Ruling(Verdict.HOLD, reasons=(PAUSED, *_hold_reasons(view)))


def held(view: View) -> Ruling | None:
    reasons = _hold_reasons(view)
    return Ruling(Verdict.HOLD, reasons=reasons) if reasons else None


def _hold_reasons(view: View) -> tuple[str, ...]:
    pending = view.limits is None and any(
        gate.name in tallies.LATENCY_GATES and gate.state not in ("disabled", "not_evaluated")
        for gate in view.gates
    )
    # One look without newer data is usual with some servers; several mean that nothing is measured.
    stale = view.standing and view.missing_in_a_row >= view.plan.stale_looks
    candidate = view.candidate
    facts = [
        *((f"early_warning:{gate.name}", gate.state == "hold") for gate in view.gates),
        *((f"not_evaluated:{gate.name}", gate.state == "not_evaluated") for gate in view.gates),
        *((f"threshold:{reading.name}", True) for reading in view.above_thresholds),
        ("quality", _length_holds(view)),
        ("split_mismatch", view.split_mismatches),
        ("metrics_missing", view.missing is not None),
        ("metrics_stale", stale),
        ("no_new_data", view.missing is None and not view.brought_data),
        ("insufficient_data", view.step_requests < view.plan.min_requests_per_step),
        ("latency_limits_pending", pending),
        ("candidate_not_running", candidate.status != "running" or candidate.replicas == 0),
        ("baseline_not_running", view.baseline.status != "running"),
        ("few_callers", view.has_few_callers),
        (
            "baseline_unhealthy",
            (view.baseline_unhealthy or view.baseline_broken) and not view.outdoes_a_sick_baseline,
        ),
    ]
    return tuple(reason for reason, applies in facts if applies)


def _length_holds(view: View) -> bool:
    """Whether answers differ in length from the baseline's although the plan does not say that this is meant."""
    bounds = view.plan.output_length
    if bounds is None or view.tokens is None:
        return False
    latency = view.plan.latency_gates
    is_meant = latency is not None and latency.per_output_token
    # Where nothing counts blank answers, a collapse of the length is the only sign of them, so that
    # even a plan which means to change the length is held.
    no_source = any(gate.name == "empty" and gate.state == "not_available" for gate in view.gates)
    if not no_source and is_meant:
        return False
    requests = sum(bucket.candidate.requests for bucket in view.span.compared)
    is_other = view.tokens < bounds.shortest or view.tokens > bounds.longest
    return requests >= bounds.min_requests and is_other


def dwell(view: View) -> Ruling | None:
    looks = sum(look.brought_data for look in view.step_looks) + view.brought_data
    if looks < view.plan.min_looks_per_step:
        return Ruling(Verdict.HOLD, reasons=("dwell",))
    return None


def advance(view: View) -> Ruling | None:
    """Take the next step without a proof: the exposure is limited, and no gate objects."""
    if view.next_weight in view.plan.compared_steps:
        return Ruling(Verdict.ADVANCE)
    return None


def unproven(view: View) -> Ruling | None:
    open_gates = [gate.name for gate in view.gates if gate.state == "open"]
    if open_gates:
        return Ruling(Verdict.HOLD, reasons=tuple(f"not_proven:{name}" for name in open_gates))
    # The gates compare, so they would prove a candidate that fails as often as a failing baseline.
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
    """Number of looks of this phase that brought usable metrics of new buckets, this one included."""
    sound = [look for look in view.record.looks if look.phase is view.phase and not look.is_missing]
    with_data = sum(look.brought_data for look in sound)
    if not view.is_missing:
        with_data += view.brought_data
    # Some servers publish no bucket without requests: there, as much time counts.
    in_time = int(view.waited / timedelta(seconds=view.plan.bucket_seconds))
    return max(with_data, min(len(sound) + (not view.is_missing), in_time))


def baking(view: View) -> Ruling:
    """Count the looks with usable metrics; little traffic is a warning and no failure."""
    if _sound_looks(view) < view.plan.bake_looks or view.is_missing:
        return Ruling(Verdict.HOLD, reasons=("baking",))
    return Ruling(Verdict.BAKED)


def still_baking(view: View) -> Ruling | None:
    """Hold until the bake has had its number of usable looks, however many it takes; only harm ends it earlier."""
    if _sound_looks(view) < view.plan.bake_looks:
        return Ruling(Verdict.HOLD, reasons=("baking",))
    return None


def take_the_rest(view: View) -> Ruling:
    """Give the candidate all traffic while everything is still proven.

    A gate that stays unproven for another step's looks, or as long as a step may wait, makes it inconclusive.
    """
    waiting = held(view) or unproven(view)
    if waiting is None:
        return Ruling(Verdict.ADVANCE)
    # As at a step: few requests count in part, and a night may pass until they come.
    plan = view.plan
    longest = plan.longest_step_seconds + plan.bake_looks * plan.data_every_seconds
    is_late = view.waited >= timedelta(seconds=longest)
    if view.looks_used[0] >= plan.bake_looks + plan.max_looks_per_step or is_late:
        return _inconclusive(view)
    return waiting


def settling(view: View) -> Ruling:
    """End after a few looks at 100 %, which show that the candidate carries all traffic."""
    if _sound_looks(view) < view.plan.settle_looks or view.is_missing:
        return Ruling(Verdict.HOLD, reasons=("settling",))
    return Ruling(Verdict.BAKED)


Rule = Callable[[View], Ruling | None]
# The rules that come first wherever both deployments answer: every reason to stop beats every reason
# to go on or to wait.
BESIDE_THE_BASELINE: tuple[Rule, ...] = (
    candidate_gone,
    baseline_gone,
    circuit_breaker,
    crashed,
    harm_shown,
    threshold_passed,
    metrics_gone,
)
RULES: dict[Phase, tuple[Rule, ...]] = {
    Phase.COMPARE: (
        *BESIDE_THE_BASELINE,
        paused_by_person,
        held,
        dwell,
        advance,
        unproven,
        ask_or_promote,
    ),
    # All is asked again after the answer: it may be hours old, and the proof must still stand.
    Phase.WAIT: (
        *BESIDE_THE_BASELINE,
        refused,
        paused_by_person,
        unanswered,
        held,
        unproven,
        approved,
    ),
    # Nothing to compare with: the baseline may be gone by now, and only fixed limits are left.
    Phase.BAKE: (
        candidate_gone,
        circuit_breaker,
        harm_shown,
        threshold_passed,
        metrics_gone,
        paused_by_person,
        baking,
    ),
    Phase.SETTLE: (candidate_gone, circuit_breaker, metrics_gone, paused_by_person, settling),
}
# The bake below 100 %: the baseline still answers, so all is compared as before.
LIVE_BAKE: tuple[Rule, ...] = (
    *BESIDE_THE_BASELINE,
    paused_by_person,
    still_baking,
    take_the_rest,
)
# A broken baseline is still better than a candidate that is gone, or that a person does not want.
_EVEN_TO_A_BROKEN_BASELINE = frozenset({"candidate_failed", "human_rejected"})


def rule_on(view: View) -> Ruling:
    """Decide by the first rule that applies, and make sure that a rollback has somewhere to go."""
    rules = LIVE_BAKE if view.phase is Phase.BAKE and view.has_baseline else RULES[view.phase]
    ruling = next(ruling for rule in rules if (ruling := rule(view)))
    # The last look counts as any other: only what is still undecided then is inconclusive.
    # A person who holds the split has decided that it waits.
    is_waiting = ruling.verdict is Verdict.HOLD and not view.is_paused
    is_held = is_waiting and view.phase is Phase.COMPARE
    # A person who resumes a rollout grants it the plan's looks again.
    at_step, at_all = view.looks_used
    is_late = view.waited >= timedelta(seconds=view.plan.longest_step_seconds)
    is_used_up = at_step >= view.plan.max_looks_per_step or at_all >= view.plan.max_looks or is_late
    if is_held and is_used_up:
        ruling = _inconclusive(view)
    if ruling.verdict not in (Verdict.ROLLBACK, Verdict.PAUSE):
        return ruling

    # A rollback needs a baseline that can take the traffic; where it cannot, stop or leave it to a person.
    if view.baseline.status in GONE:
        return Ruling(Verdict.ABORT, "baseline_missing", (*ruling.reasons, "baseline_missing"))
    if view.baseline_broken and ruling.reason not in _EVEN_TO_A_BROKEN_BASELINE:
        return Ruling(Verdict.PAUSE, "baseline_unhealthy", (*ruling.reasons, "baseline_broken"))
    return ruling
