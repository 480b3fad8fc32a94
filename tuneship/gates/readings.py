"""Reads one gate at one look: weighs its counts against its limits, and returns each number with its limit.

Next: `canary.py` turns the readings into one verdict.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuneship.contract.metrics import MetricSeries
from tuneship.gates.gate_types import Gate, GateReading, GateState
from tuneship.gates.kinds import GATES
from tuneship.gates.plan import CanaryRules
from tuneship.gates.record import Phase
from tuneship.gates.statistics import evidence
from tuneship.gates.statistics.evidence import Limits
from tuneship.gates.tallies import LATENCY_GATES, Tally


@dataclass(frozen=True)
class Stage:
    """The tests of one phase: its name, the compared steps, the threshold 1/alpha_g as a logarithm, and the cold
    buckets.

    `settled`: enough looks have passed since the last increase for slowness to be no cold start.
    """

    phase: Phase
    steps: int
    log_threshold: float
    settled: bool
    rollout: str = ""


def choose_gates(plan: CanaryRules, baseline_metrics: MetricSeries | None) -> tuple[Gate, ...]:
    """The gates of a rollout, fixed before it begins; the active ones share alpha for its whole duration.

    `baseline_metrics`: the baseline's series from before the start. A gate takes the service's own counts where these
    series have them, else those of the plan's traffic driver; without either it is `not_available`.
    """
    return tuple(kind.choose(plan, baseline_metrics) for kind in GATES.values())


def limits_of(plan: CanaryRules, name: str) -> Limits | None:
    """The plan's three limits of a gate; None where one is missing, or for a gate that only an older version had."""
    kind = GATES.get(name)
    gate = kind.limits(plan) if kind else None
    return gate.limits() if gate else None


def read_gate(gate: Gate, limits: Limits, tally: Tally, stage: Stage) -> GateReading:
    """State and numbers of an active gate."""
    is_alone = tally.live is not None
    against, of_step = limits, stage.phase is Phase.COMPARE
    if tally.live is not None:
        # At 100 % only the absolute half is left, against the baseline's share as it was when it last
        # had traffic.
        frozen = _share(sum(c.x_b for c in tally.live), sum(c.n_b for c in tally.live)) or 0.0
        if limits.harm is None or limits.ratio is None:
            return GateReading(gate.name, "open", gate.reason)
        # A margin of 1 or more could never be exceeded, and its logarithm does not exist.
        margin = min(max(limits.ratio * frozen, limits.harm), 0.9)
        against = Limits(None, margin, limits.ok)
    terms = evidence.step_terms(tally.starts, stage.steps) if of_step else None
    terms = terms or evidence.wait_terms(tally.starts)
    key = (stage.rollout, gate.name, stage.phase)
    harm = evidence.harm(tally.counts, against, terms, absolute_only=is_alone, key=key)
    # Over many buckets the cap bounds what dependent requests can do; the fast tier's cap is higher, so
    # repeats are left out of it.
    if tally.distinct is not tally.counts:
        distinct = evidence.harm(
            tally.distinct, against, terms, absolute_only=is_alone, key=(key, "distinct")
        )
        harm = replace(harm, log_fast=distinct.log_fast)
    newest = tally.distinct[-evidence.WARNING_BUCKETS :]
    now = newest[-evidence.NOW_BUCKETS :]
    is_worse_now = evidence.early_warning(now, against)
    proof = evidence.proof(tally.counts, limits, also=tally.wider, key=key)

    is_latency = gate.name in LATENCY_GATES
    beyond = harm.log_e >= stage.log_threshold or harm.log_fast >= evidence.LOG_FAST_TIER
    # What a cold start has left in the evidence for harm holds no longer than the slowness itself.
    warned = is_worse_now if is_latency else harm.log_e >= evidence.LOG_WARN
    state: GateState = "open"
    # Still slow, and not just cold. Further conditions only make a rollback rarer, so alpha holds.
    if beyond and (not is_latency or (is_worse_now and stage.settled)):
        state = "harm"
    # Harm beats a warning, and a warning beats a proof: what is proven over all looks may just have
    # begun to turn. At 100 % there is nothing to wait for.
    elif not is_alone:
        if warned or evidence.early_warning(newest, against):
            state = "hold"
        elif proof.log_e >= evidence.LOG_PROVEN:
            state = "proven"
    n_c, x_c, n_b, x_b, _, _ = proof.counts
    reading = GateReading(
        name=gate.name,
        state=state,
        reason=gate.reason,
        candidate_requests=n_c,
        candidate_bad=x_c,
        candidate_share=_share(x_c, n_c),
        baseline_requests=n_b,
        baseline_bad=x_b,
        baseline_share=_share(x_b, n_b),
        ratio_limit=limits.ratio,
        harm_limit=against.harm,
        log_e_harm=harm.log_e,
        log_e_harm_limit=stage.log_threshold,
        log_u_harm=harm.log_fast,
        log_u_harm_limit=evidence.LOG_FAST_TIER,
        z_now=evidence.early_z(now, against),
    )
    if is_alone:
        return reading
    return replace(
        reading,
        ok_limit=limits.ok,
        log_e_ok=proof.log_e,
        log_e_ok_limit=evidence.LOG_PROVEN,
        z=evidence.early_z(newest, limits),
        z_limit=evidence.Z_WARN,
        requests_to_proof=evidence.requests_to_proof(proof, limits) if state == "open" else None,
    )


def _share(bad: int, requests: int) -> float | None:
    return bad / requests if requests else None


def log_threshold(plan: CanaryRules, gates: Sequence[Gate], name: str) -> float:
    """log(1 / alpha_g) of the gate `name`: alpha is shared by the active gates, in proportion to their shares."""
    # Bonferroni, since the gates' evidence is not independent. Shares that sum to less than 1 leave the
    # rest of alpha unspent.
    active = sum(_alpha_share(gate.name) for gate in gates if gate.state == "active")
    return math.log(max(active, 1.0) / _alpha_share(name) / plan.alpha)


def _alpha_share(name: str) -> float:
    # A record may name a gate that this release no longer has.
    kind = GATES.get(name)
    return kind.alpha_share if kind else 1.0
