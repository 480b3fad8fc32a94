"""Every gate of the plan has somebody who counts its bad requests, and a gate without one is never proven."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.unit.gates.drawn import PUBLISHED
from tests.unit.gates.rollouts import Rollout, Served, Steady, plan_with
from tuneship.gates.gate_types import Gate
from tuneship.gates.kinds import BAD_ANSWERS, GATES, GateKind, is_repetitive
from tuneship.gates.plan import AnswerGate, CallerGates, LatencyGates, QualityGates
from tuneship.gates.readings import choose_gates, limits_of
from tuneship.gates.record import Probed, RolloutRecord, Verdict
from tuneship.gates.statistics.evidence import Limits

LIMITS = {"ratio": 2.0, "harm": 0.125, "ok": 0.25}
DRIVER = {"prompts": "prompts.jsonl", "requests_per_second": 5.0}


def _gate_fields() -> dict[str, dict[str, Any]]:
    """Return, by gate, the fields of the plan that switch on this gate with its own limits."""
    found: dict[str, dict[str, Any]] = {"error": {"error_gate": LIMITS}}
    for group, model in (
        ("latency_gates", LatencyGates),
        ("quality_gates", QualityGates),
        ("caller_gates", CallerGates),
    ):
        for name, field in model.model_fields.items():
            if "Gate" in str(field.annotation):
                found[name] = {group: {name: {} if name == "typical" else LIMITS}}
    return found


def test_every_gate_of_the_plan_has_a_counter_and_reads_its_own_limits() -> None:
    fields = _gate_fields()
    assert fields.keys() == GATES.keys()
    published = PUBLISHED
    for name, given in fields.items():
        plan = plan_with(**given, traffic=DRIVER)
        farther = (5, 8) if name == "slow" else (9, 13)
        times = name in ("slow", "typical")
        shares = {"ratio": 1.25, "harm": None, "ok": None} if name == "typical" else LIMITS
        assert limits_of(plan, name) == Limits(**shares, farther=farther if times else None)
        gate = next(gate for gate in choose_gates(plan, published) if gate.name == name)
        assert gate.state == "active"


def test_a_gate_that_nothing_counts_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="nothing counts the bad requests of the gate 'echo'"):
        GateKind("echo", "quality", lambda plan: plan.error_gate)


@pytest.mark.parametrize("name", [name for name, kind in GATES.items() if kind.count is None])
def test_a_gate_that_needs_the_driver_is_refused_without_one(name: str) -> None:
    with pytest.raises(ValidationError, match=f"nothing counts for quality_gates.{name}"):
        plan_with(quality_gates={name: LIMITS})
    plan = plan_with(quality_gates={name: LIMITS}, traffic=DRIVER)
    assert isinstance(getattr(plan.quality_gates, name), AnswerGate)


def test_echoed_patient_data_is_no_gate_as_long_as_nobody_counts_it() -> None:
    with pytest.raises(ValidationError, match="phi_echo"):
        plan_with(quality_gates={"phi_echo": LIMITS}, traffic=DRIVER)


def _counted_for(*gates: str) -> Callable[[Served, Served], Probed]:
    nothing_bad = dict.fromkeys(gates, 0)
    return lambda baseline, candidate: Probed(
        candidate.requests,
        baseline.requests,
        candidate_bad=nothing_bad,
        baseline_bad=nothing_bad,
    )


def test_a_driver_that_did_not_look_for_a_fault_is_no_proof_that_there_was_none() -> None:
    """The driver of an older version counts for fewer gates."""
    plan = plan_with(quality_gates={"repetition": LIMITS}, traffic=DRIVER)
    look = Rollout(plan, Steady(), probe=_counted_for("empty")).begin().look()
    assert look.verdict is Verdict.HOLD
    assert look.missing == "the traffic driver did not count for the gate repetition"
    look = Rollout(plan, Steady(), probe=_counted_for("empty", "repetition")).begin().look()
    assert look.missing is None


def test_a_gate_of_an_older_version_that_is_still_in_a_record_is_never_proven() -> None:
    """A rollout that began with the gate on echoed patient data is held, because nobody counted for that gate."""
    rollout = Rollout(plan_with(traffic=DRIVER), Steady(), probe=_counted_for(*BAD_ANSWERS)).begin()
    begun = rollout.record.begun
    echo = Gate("phi_echo", "quality", "probes", "active")
    rollout.record = RolloutRecord(
        (replace(begun, gates=(*begun.gates, echo)), *rollout.record.facts[1:])
    )
    last = rollout.run(most=30)
    reading = next(gate for gate in last.gates if gate.name == "phi_echo")
    assert (reading.state, rollout.record.weight < 100) == ("not_evaluated", True)
    assert "not_evaluated:phi_echo" in last.reasons


def test_a_repeated_run_of_four_words_is_a_loop() -> None:
    assert is_repetitive("on and on and " * 10)
    assert not is_repetitive("Certain infectious and parasitic diseases of the intestine")
    assert not is_repetitive("a b c")
