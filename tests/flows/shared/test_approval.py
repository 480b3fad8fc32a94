"""A person approves in the Prefect UI or does not answer, and a regression overrules the answer at any moment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled

from flows.guard import guard
from flows.shared import approval
from flows.shared.errors import BadInput
from flows.shift_traffic import shift_traffic
from flows.upkeep.guard_form import GuardRules
from tests.flows.conftest import PATIENCE_S, Script, plan, wait_for
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, Arm, FakeService
from tuneship.gates.plan import CanaryPlan

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
STEPS = [50, 100]
# Seconds after which a missing answer fails the test, so that nobody waits for a day.
GIVEN_UP_S = 1200


def questions() -> list[FlowRun]:
    """The questions about this candidate, newest first."""
    name = FlowRunFilterName(any_=[f"promote-{CANDIDATE}"])
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=name))
    return sorted(runs, key=lambda run: run.created or run.expected_start_time, reverse=True)


def is_asked(before: int) -> bool:
    """Whether there are more questions than before, and the newest can be answered."""
    state = questions()[0].state if len(questions()) > before else None
    return state is not None and state.is_paused()


def resume(run: FlowRun, **said: Any) -> httpx.Response:
    """Send what the UI's Resume button sends, and send it again while Prefect's SQLite is locked (503)."""
    url = f"{PREFECT_API_URL.value()}/flow_runs/{run.id}/resume"
    answers: list[httpx.Response] = []

    def press() -> bool:
        answers.append(
            httpx.post(url, json={"run_input": said}, trust_env=False, timeout=PATIENCE_S)
        )
        return answers[-1].status_code != 503

    wait_for(press)
    return answers[-1]


@contextmanager
def a_person(says: Callable[[FlowRun], object]) -> Iterator[None]:
    """Let a person answer the next question."""
    before = len(questions())

    def act() -> None:
        wait_for(lambda: is_asked(before))
        says(questions()[0])

    person = Thread(target=act)
    person.start()
    try:
        yield
    finally:
        person.join()


def approve(run: FlowRun) -> None:
    assert resume(run, decision="promote", approver="Ann").status_code == 201


def waiting(**changes: Any) -> CanaryPlan:
    usual = {"approval": "required", "approval_timeout_seconds": GIVEN_UP_S, "steps": STEPS}
    return plan(**(usual | {"look_every_seconds": 0.02} | changes))


def test_the_approver_is_asked_once_and_the_candidate_is_promoted(fake: FakeService) -> None:
    with a_person(approve):
        result = shift_traffic(waiting())

    assert (result.outcome, result.reason) == ("promoted", "none")
    assert result.approval == {"decision": "promote", "approver": "Ann", "comment": ""}
    assert [patch.weights.get(CANDIDATE) for patch in fake.patches] == [50, 80, 100]
    assert [one["verdict"] for one in result.decisions].count("ask") == 1
    asked = questions()[0]
    assert asked.state is not None
    assert (asked.state.is_completed(), asked.state.message) == (True, "promote by Ann")
    assert asked.parent_task_run_id is not None, "it stands on the page of the run that asks"


def test_no_means_no_and_says_who(fake: FakeService) -> None:
    def refuse(run: FlowRun) -> None:
        said = {"decision": "roll back", "approver": "Ben", "comment": "not in this week"}
        assert resume(run, **said).status_code == 201

    with a_person(refuse):
        result = shift_traffic(waiting(steps=[5, 25, 50, 75, 100]))

    assert (result.outcome, result.reason) == ("rolled_back", "human_rejected")
    assert [p.weights.get(CANDIDATE) for p in fake.patches] == [5, 25, 50, 75, 0]
    assert result.approval is not None
    assert (result.approval["approver"], result.approval["comment"]) == ("Ben", "not in this week")


def test_a_form_without_a_name_is_refused_and_the_question_stays_open(fake: FakeService) -> None:
    answers: list[tuple[int, str]] = []

    def forget_the_name(run: FlowRun) -> None:
        wait_for(lambda: "approver" in str(resume(run, decision="promote").json()["details"]))
        bad = resume(run, decision="perhaps", approver="Ann")
        answers.append((bad.status_code, bad.json()["status"]))
        approve(run)

    with a_person(forget_the_name):
        assert shift_traffic(waiting()).outcome == "promoted"
    assert answers == [(200, "REJECT")]


def test_no_answer_in_time_rolls_back(fake: FakeService) -> None:
    result = shift_traffic(waiting(approval_timeout_seconds=1))

    assert (result.outcome, result.reason) == ("rolled_back", "approval_timeout")
    assert fake.weights[BASELINE] == 100
    late = resume(questions()[0], decision="promote", approver="Ann").json()["status"]
    assert late == "ABORT"


def test_a_regression_while_a_person_thinks_rolls_back_and_refuses_the_late_approval(
    fake: FakeService,
) -> None:
    broken: list[bool] = []
    fake.arms[CANDIDATE] = Arm(error_share=lambda _, __: 0.3 if broken else 0.003)

    with a_person(lambda _: broken.append(True)):
        result = shift_traffic(waiting())

    assert (result.outcome, result.reason) == ("rolled_back", "crash")
    asked = questions()[0]
    assert asked.state is not None
    assert asked.state.is_cancelled()
    assert resume(asked, decision="promote", approver="Ann").json()["status"] == "ABORT"


def test_the_lease_is_renewed_while_a_person_thinks(fake: FakeService) -> None:
    fake.seconds_per_bucket = 0.05

    def think(run: FlowRun) -> None:
        ends = lease_end(fake)
        wait_for(lambda: lease_end(fake) > ends + 10)
        approve(run)

    with a_person(think):
        result = shift_traffic(waiting(look_every_seconds=0.1))
    assert result.outcome == "promoted"


def lease_end(fake: FakeService) -> float:
    """The end of the current lease, which a slow test does not outlive."""
    assert fake.lease_ends is not None
    return fake.lease_ends


def test_a_question_that_somebody_cancels_is_a_no(fake: FakeService) -> None:
    def cancel(run: FlowRun) -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run.id, Cancelled())

    with a_person(cancel):
        result = shift_traffic(waiting())
    assert (result.outcome, result.reason) == ("rolled_back", "human_rejected")


def test_a_flow_that_died_before_its_form_was_there_asks_again(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = approval.ApprovalQuestion(f"promote-{CANDIDATE}", "All?", "died-while-asking", 60)

    def die(*_: Any, **__: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(approval.Approval, "save", die)
        with pytest.raises(SystemExit):
            approval.ask(question)
    leftover = questions()[0]
    run_id, _ = approval.ask(question)
    assert run_id != str(leftover.id)
    assert approval.ask(question)[0] == run_id
    assert resume(questions()[0], decision="promote", approver="Ann").status_code == 201
    approval.withdraw(question.tag, "the test ends")
    states = {str(run.id): run.state for run in questions()}
    assert states[str(leftover.id)].is_cancelled()


def test_a_killed_run_goes_on_with_the_answer_that_came_meanwhile(
    fake: FakeService, run: Callable[[CanaryPlan], Script]
) -> None:
    wanted = waiting(look_every_seconds=0.25)
    before = len(questions())
    script = run(wanted)
    wait_for(lambda: is_asked(before))
    script.process.kill()
    script.process.wait()
    approve(questions()[0])

    result = shift_traffic(wanted)

    assert result.outcome == "promoted"
    assert result.approval is not None
    assert result.approval["approver"] == "Ann"
    assert len(questions()) == before + 1


def test_the_guard_returns_what_waited_for_a_person_and_withdraws_the_question(
    fake: FakeService, run: Callable[[CanaryPlan], Script]
) -> None:
    before = len(questions())
    script = run(waiting(look_every_seconds=0.25))
    wait_for(lambda: is_asked(before))
    script.process.kill()
    script.process.wait()

    wait_for(lambda: guard(GuardRules(silence_seconds=0)).outcome == "returned")

    assert fake.weights[BASELINE] == 100
    state = questions()[0].state
    assert state is not None
    assert state.is_cancelled()


def test_a_server_that_ends_with_the_run_is_refused_before_anything_is_touched(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approval, "_own_servers", [PREFECT_API_URL.value()])
    with pytest.raises(BadInput, match="PREFECT_API_URL"):
        shift_traffic(waiting())
    assert fake.created == 0
