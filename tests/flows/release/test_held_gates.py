"""A training gate that holds asks a person if the release says that somebody is there to answer."""

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun

from flows.forms.release_form import ReleaseParameters
from flows.release.release_run import begin
from tests.flows.conftest import wait_for
from tests.flows.shared.test_approval import GIVEN_UP_S, resume
from tests.support.fakes.canary_service import FakeService
from tuneship.gates.gate_result import GateResult
from tuneship.gates.training.training_gates import TrainingVerdict

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
HELD = GateResult("T8 enough data", "hold", note="12 examples")
PASSED = GateResult("T1 finite", "pass")


def release(run_key: str, **canary: Any) -> ReleaseParameters:
    return ReleaseParameters.model_validate(
        {
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


def judged(wanted: ReleaseParameters, verdict: TrainingVerdict) -> Any:
    """Check this verdict in a run; return its result, None when the run goes on, and the run's notes."""

    @flow
    def judging() -> Any:
        run = begin(wanted)
        try:
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
