"""One gate at one look: its counts weighed against its limits, with every number beside its limit.

Next: `canary.py` turns the readings into one verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from tuneship.gates import evidence
from tuneship.gates.evidence import Counts, Harm, Limits
from tuneship.gates.plan import CanaryRules, GateLimits
from tuneship.gates.record import Gate, GateReading, GateState, Phase
from tuneship.gates.series import Json
from tuneship.gates.tallies import Tally


@dataclass(frozen=True)
class Stage:
    """How one phase tests: its name, the number of compared steps, and the threshold 1/alpha_g as a logarithm."""

    phase: Phase
    steps: int
    log_threshold: float


def choose_gates(plan: CanaryRules, baseline_metrics: Json | None) -> tuple[Gate, ...]:
    """The gates of a roll-out, fixed before it begins: alpha is shared among the active ones for all of it.

    `baseline_metrics`: an answer taken before the start. The source of `empty` is the service's own count where that
    answer has one, else the plan's traffic driver, else there is none. The other quality gates need the driver.
    """
    latency, quality = plan.latency_gates, plan.quality_gates
    has_count = _publishes_empty(baseline_metrics)
    driver = plan.traffic is not None
    gates = [
        _gate("error", "error_rate", plan.error_gate),
        _gate("slow", "latency", latency and latency.slow),
        _gate("very_slow", "latency", latency and latency.very_slow),
        _gate("empty", "quality", quality and quality.empty, probes=not has_count, driver=driver),
    ]
    for name in ("length", "repetition", "invalid_json", "phi_echo"):
        limits: GateLimits | None = quality and getattr(quality, name)
        gates.append(_gate(name, "quality", limits, probes=True, driver=driver))
    return tuple(gates)


def _gate(
    name: str, reason: str, limits: GateLimits | None, *, probes: bool = False, driver: bool = True
) -> Gate:
    source = "probes" if probes else "series"
    if limits is None:
        return Gate(name, reason, source, "disabled")
    if probes and not driver:
        return Gate(name, reason, source, "not_available")
    return Gate(name, reason, source, "active" if limits.limits() else "not_evaluated")


def _publishes_empty(answer: Json | None) -> bool:
    inner: Any = answer
    for key in ("metrics", "token_usage", "empty_count"):
        inner = cast("Json", inner).get(key) if isinstance(inner, Mapping) else None
    return isinstance(inner, list)


def limits_of(plan: CanaryRules, name: str) -> Limits | None:
    """The plan's three limits of a gate."""
    if name == "error":
        gate = plan.error_gate
    elif name in ("slow", "very_slow"):
        gate = plan.latency_gates and getattr(plan.latency_gates, name)
    else:
        gate = plan.quality_gates and getattr(plan.quality_gates, name)
    return gate.limits() if gate else None


def read_gate(gate: Gate, limits: Limits, tally: Tally, stage: Stage) -> GateReading:
    """State and numbers of an active gate."""
    if stage.phase is Phase.BAKE:
        return _read_bake(gate, limits, tally, stage)
    counts = tally.compared
    if stage.phase is Phase.COMPARE:
        terms, idle = evidence.step_terms(tally.starts, stage.steps)
    else:
        terms, idle = evidence.wait_terms(tally.starts)
    harm = evidence.harm(counts, limits, terms, idle)
    log_e_ok = evidence.log_e_ok(counts, limits)
    state = _harm_state(harm, stage)
    if state == "open" and (harm.warned or evidence.early_warning(counts, limits)):
        state = "hold"
    if state == "open" and log_e_ok >= evidence.LOG_PROVEN:
        state = "proven"
    return replace(
        _counted(gate, state, counts, harm, stage),
        ratio_limit=limits.ratio,
        harm_limit=limits.harm,
        ok_limit=limits.ok,
        log_e_ok=log_e_ok,
        log_e_ok_limit=evidence.LOG_PROVEN,
        z=evidence.early_z(counts, limits),
        z_limit=evidence.Z_WARN,
        requests_to_proof=evidence.requests_to_proof(counts, limits) if state == "open" else None,
    )


def _read_bake(gate: Gate, limits: Limits, tally: Tally, stage: Stage) -> GateReading:
    """At 100 % only the absolute half is left, against the baseline's share as it was when it last had traffic."""
    frozen = _share(sum(c.x_b for c in tally.compared), sum(c.n_b for c in tally.compared)) or 0.0
    margin = min(max(limits.ratio * frozen, limits.harm), 0.9)
    terms, idle = evidence.wait_terms(tally.starts)
    against = Limits(limits.ratio, margin, limits.ok)
    harm = evidence.harm(tally.baked, against, terms, idle, absolute_only=True)
    reading = _counted(gate, _harm_state(harm, stage), tally.baked, harm, stage)
    return replace(reading, ratio_limit=limits.ratio, harm_limit=margin)


def _harm_state(harm: Harm, stage: Stage) -> GateState:
    beyond = harm.log_e >= stage.log_threshold or harm.log_u >= evidence.LOG_UNCAPPED_TIER
    return "harm" if beyond else "open"


def _counted(
    gate: Gate, state: GateState, counts: Sequence[Counts], harm: Harm, stage: Stage
) -> GateReading:
    n_c, x_c = sum(c.n_c for c in counts), sum(c.x_c for c in counts)
    n_b, x_b = sum(c.n_b for c in counts), sum(c.x_b for c in counts)
    return GateReading(
        name=gate.name,
        state=state,
        reason=gate.reason,
        candidate_requests=n_c,
        candidate_bad=x_c,
        candidate_share=_share(x_c, n_c),
        baseline_requests=n_b,
        baseline_bad=x_b,
        baseline_share=_share(x_b, n_b),
        log_e_harm=harm.log_e,
        log_e_harm_limit=stage.log_threshold,
        log_u_harm=harm.log_u,
        log_u_harm_limit=evidence.LOG_UNCAPPED_TIER,
    )


def _share(bad: int, requests: int) -> float | None:
    return bad / requests if requests else None


def log_threshold(plan: CanaryRules, gates: Sequence[Gate]) -> float:
    """log(1 / alpha_g), alpha shared equally by the active gates."""
    active = sum(gate.state == "active" for gate in gates)
    return math.log(max(active, 1) / plan.alpha)
