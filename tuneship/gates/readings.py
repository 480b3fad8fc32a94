"""One gate at one look: its counts weighed against its limits, with every number beside its limit.

Next: `canary.py` turns the readings into one verdict.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tuneship.contract.metrics import MetricSeries
from tuneship.gates import evidence
from tuneship.gates.evidence import BucketCounts, Harm, Limits
from tuneship.gates.gate_types import Gate, GateReading, GateState
from tuneship.gates.kinds import GATES
from tuneship.gates.plan import CanaryRules
from tuneship.gates.record import Phase
from tuneship.gates.tallies import Tally


@dataclass(frozen=True)
class Stage:
    """How one phase tests: its name, the compared steps, the threshold 1/alpha_g as a logarithm, and the formula."""

    phase: Phase
    steps: int
    log_threshold: float
    formula: int


def choose_gates(plan: CanaryRules, baseline_metrics: MetricSeries | None) -> tuple[Gate, ...]:
    """The gates of a rollout, fixed before it begins: alpha is shared among the active ones for all of it.

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
    if tally.live is not None:
        return _read_alone(gate, limits, tally, tally.live, stage)
    counts = tally.counts
    if stage.phase is Phase.COMPARE:
        terms, idle = evidence.step_terms(tally.starts, stage.steps)
    else:
        terms, idle = evidence.wait_terms(tally.starts)
    harm, heard = _weigh(
        tally,
        lambda part: evidence.harm(part, limits, terms, idle, charge_falls=stage.formula < 2),
    )
    log_e_ok = evidence.log_e_ok(counts, limits)
    state = _harm_state(harm, heard, stage)
    # Harm beats a warning, and a warning beats a proof: what is proven over all looks may just have
    # begun to turn.
    if state == "open" and (heard.warned or evidence.early_warning(tally.warning, limits)):
        state = "hold"
    if state == "open" and log_e_ok >= evidence.LOG_PROVEN:
        state = "proven"
    return replace(
        _counted(gate, state, counts, (harm, heard), stage),
        ratio_limit=limits.ratio,
        harm_limit=limits.harm,
        ok_limit=limits.ok,
        log_e_ok=log_e_ok,
        log_e_ok_limit=evidence.LOG_PROVEN,
        z=evidence.early_z(tally.warning, limits),
        z_limit=evidence.Z_WARN,
        requests_to_proof=evidence.requests_to_proof(counts, limits) if state == "open" else None,
    )


def _weigh(tally: Tally, weigh: Callable[[Sequence[BucketCounts]], Harm]) -> tuple[Harm, Harm]:
    """Harm in all counts, and in those after the warm-ups; one caller's repeats never decide in a single bucket."""
    harm = weigh(tally.counts)
    # Over many buckets the cap bounds what dependent requests can do; the uncapped value has no such
    # bound, so repeats are left out of it.
    if tally.distinct is not tally.counts:
        harm = replace(harm, log_u=weigh(tally.distinct).log_u)
    return harm, harm if tally.heard is tally.counts else weigh(tally.heard)


def _read_alone(
    gate: Gate, limits: Limits, tally: Tally, live: Sequence[BucketCounts], stage: Stage
) -> GateReading:
    """At 100 % only the absolute half is left, against the baseline's share as it was when it last had traffic."""
    frozen = _share(sum(c.x_b for c in live), sum(c.n_b for c in live)) or 0.0
    # A margin of 1 or more could never be exceeded, and its logarithm does not exist.
    margin = min(max(limits.ratio * frozen, limits.harm), 0.9)
    terms, idle = evidence.wait_terms(tally.starts)
    against = Limits(limits.ratio, margin, limits.ok)
    harm, heard = _weigh(
        tally,
        lambda part: evidence.harm(
            part, against, terms, idle, absolute_only=True, charge_falls=stage.formula < 2
        ),
    )
    state = _harm_state(harm, heard, stage)
    reading = _counted(gate, state, tally.counts, (harm, heard), stage)
    return replace(reading, ratio_limit=limits.ratio, harm_limit=margin)


def _harm_state(harm: Harm, heard: Harm, stage: Stage) -> GateState:
    """Harm is shown by all counts, so the limit on false rollbacks holds; and it goes on after the warm-up."""
    beyond = harm.log_e >= stage.log_threshold or harm.log_u >= evidence.LOG_UNCAPPED_TIER
    return "harm" if beyond and (heard is harm or heard.log_e >= evidence.LOG_HEARD) else "open"


def _counted(
    gate: Gate,
    state: GateState,
    counts: Sequence[BucketCounts],
    weighed: tuple[Harm, Harm],
    stage: Stage,
) -> GateReading:
    harm, heard = weighed
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
        log_e_heard=None if heard is harm else heard.log_e,
        log_e_heard_limit=None if heard is harm else evidence.LOG_HEARD,
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
