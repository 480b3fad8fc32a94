"""A gate before any traffic that holds asks a person if the release says that somebody is there to answer."""

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun

from flows.forms.release_form import ReleaseParameters
from flows.release.held_out import HeldOutGate
from flows.release.release_run import begin
from tests.flows.conftest import wait_for
from tests.flows.shared.test_approval import GIVEN_UP_S, resume
from tests.support.fakes.canary_service import FakeService
from tuneship.gates.gate_result import GateResult
from tuneship.gates.training.training_gates import TrainingVerdict

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
OPEN = GateResult("T12 evaluation", "hold", note="not decided on 50 examples")
HELD = GateResult("T8 enough data", "hold", note="12 examples")
PASSED = GateResult("T1 finite", "pass")


def release(run_key: str, on_inconclusive: str = "continue", **canary: Any) -> ReleaseParameters:
    return ReleaseParameters.model_validate(
        {
            "evaluation": {"on_inconclusive": on_inconclusive},
            "model": "ft:tuneship-tiny:m:0123456789",
            "model_name": "m",
            "endpoint": {"name": "shop"},
            "run_key": run_key,
            "canary": {
                "approval": "required",
                "approval_timeout_seconds": GIVEN_UP_S,
                **canary,
            },
        }
    )


def judged(wanted: ReleaseParameters, verdict: TrainingVerdict | GateResult) -> Any:
    """Check a training, or the gate of an evaluation; return the run's result, None when it goes on, and its notes."""

    @flow
    def judging() -> Any:
        run = begin(wanted)
        try:
            if isinstance(verdict, GateResult):
                return run.check_evaluation(HeldOutGate(verdict, None)), run.notes
            return run.check_training(verdict), run.notes
        finally:
            run.record.release()

    return judging()


def asked(run_key: str) -> list[FlowRun]:
    """The questions that were asked about the gates of this run."""
    tags = FlowRunFilterTags(all_=[f"{run_key}/training-gates"])
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=tags))


def answer(run_key: str, **said: str) -> Thread:
    def act() -> None:
        wait_for(lambda: bool(asked(run_key)))
        (run,) = asked(run_key)
        wait_for(lambda: resume(run, **said).status_code == 201)

    person = Thread(target=act)
    person.start()
    return person


def test_a_person_may_let_a_held_training_go_on(fake: FakeService, records: Path) -> None:
    person = answer("yes", decision="promote", approver="Ann")
    result, notes = judged(release("yes"), TrainingVerdict("hold", HELD.name, (PASSED, HELD)))
    person.join()
    assert result is None
    assert notes == ["gates that hold, a person decided: promote by Ann"]


def test_a_no_is_a_rejection_with_the_gate_and_the_name(fake: FakeService, records: Path) -> None:
    person = answer("no", decision="roll back", approver="Ben")
    result, _ = judged(release("no"), TrainingVerdict("hold", HELD.name, (HELD,)))
    person.join()
    assert (result.outcome, result.reason, result.gate) == (
        "rejected",
        "training_gate",
        "T8 enough data",
    )
    assert "roll back by Ben" in result.notes[0]


def test_without_an_answer_in_time_it_is_rejected(fake: FakeService, records: Path) -> None:
    wanted = release("silence", approval_timeout_seconds=1)
    result, _ = judged(wanted, TrainingVerdict("hold", HELD.name, (HELD,)))
    assert (result.outcome, result.reason) == ("rejected", "training_gate")
    assert len(asked("silence")) == 1


def test_nobody_is_asked_about_a_gate_that_rejects_or_without_a_person_to_ask(
    fake: FakeService, records: Path
) -> None:
    bad = GateResult("T1 finite", "reject")
    result, _ = judged(release("reject"), TrainingVerdict("reject", bad.name, (bad, HELD)))
    assert (result.outcome, asked("reject")) == ("rejected", [])

    alone = release("alone", approval="never")
    result, _ = judged(alone, TrainingVerdict("hold", HELD.name, (HELD,)))
    assert (result.outcome, asked("alone")) == ("rejected", [])


def test_a_person_decides_about_an_evaluation_that_cannot(fake: FakeService, records: Path) -> None:
    for said, outcome in (("promote", None), ("roll back", "rejected")):
        person = answer(said, decision=said, approver="Ann")
        result, notes = judged(release(said, "hold"), OPEN)
        person.join()
        assert (result and result.outcome) == outcome
        if result is None:
            assert notes == ["gates that hold, a person decided: promote by Ann"]
        else:
            assert (result.reason, result.gate) == ("evaluation", OPEN.name)
            assert "roll back by Ann" in result.notes[-1]


def test_nobody_is_asked_about_an_evaluation_whose_release_goes_on_or_has_nobody(
    fake: FakeService, records: Path
) -> None:
    result, notes = judged(release("on", "continue"), OPEN)
    assert (result, asked("on")) == (None, [])
    assert "holds, and the release continues" in notes[0]
    result, _ = judged(release("nobody", "hold", approval="never"), OPEN)
    assert (result.outcome, result.reason, asked("nobody")) == ("rejected", "evaluation", [])
    worse = GateResult(OPEN.name, "reject", -0.1, -0.03)
    result, _ = judged(release("worse", "hold"), worse)
    assert (result.outcome, result.gate, asked("worse")) == ("rejected", OPEN.name, [])
