"""The result of a rollout holds every decision, and states only once what never changes."""

import json
from dataclasses import replace

from flows.rollout.result import result_of
from tests.unit.gates.rollouts import Rollout, Steady, lines_of, plan_with
from tuneship.gates.record import Begun, Ended, RolloutRecord, from_lines, to_line

LOOKS = 29


def rollout() -> RolloutRecord:
    """A promotion after 29 looks under the default plan, in which the gates that need a driver are off."""
    plan = plan_with(steps=[10, 25, 50, 100], interval="1s", bake_looks=15)
    driven = Rollout(plan, Steady(6000)).begin()
    while len(driven.record.looks) < LOOKS:
        driven.look()
    begun = replace(driven.record.begun, plan=plan.model_dump(mode="json"))
    facts = [begun if isinstance(one, Begun) else one for one in driven.record.facts]
    return RolloutRecord((*facts, Ended("promoted", "none")))


def test_a_gate_that_is_off_is_named_once_with_its_reason() -> None:
    record = rollout()
    off = {gate.name: gate.state for gate in record.begun.gates if gate.state != "active"}
    assert off, "the plan of this test switches none off"

    result = result_of(record, [])

    gates = {gate["name"]: gate for gate in result.gates}
    assert list(gates) == [gate.name for gate in record.begun.gates]
    assert {name: gates[name]["state"] for name in off} == off
    assert all(gates[name]["why"] for name in off)
    active = {gate.name for gate in record.begun.gates if gate.state == "active"}
    assert [set(look["gates"]) for look in result.decisions] == [active] * LOOKS


def test_a_look_has_no_null_and_every_value_that_the_record_has() -> None:
    record = rollout()
    result = result_of(record, [])

    text = json.dumps(result.decisions, indent=2)

    assert "null" not in text
    whole = json.dumps([json.loads(to_line(look)) for look in record.looks], indent=2)
    assert len(text.splitlines()) < 0.6 * len(whole.splitlines())
    for look, decision in zip(record.looks, result.decisions, strict=True):
        for reading in look.gates:
            if reading.name in decision["gates"]:
                assert (
                    decision["gates"][reading.name]["candidate_requests"]
                    == reading.candidate_requests
                )
                assert decision["gates"][reading.name].get("log_e_ok") == reading.log_e_ok


def test_the_record_keeps_what_the_result_leaves_out() -> None:
    record = rollout()
    again = from_lines(lines_of(record.facts))
    assert again == record
    assert result_of(again, []) == result_of(record, [])
