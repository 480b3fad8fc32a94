"""A question is answered in Prefect or in the service: what is found first is recorded once, and closes the other."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL

from flows.release import gate_approval
from flows.release.record_file import ReleaseRecord, ReleaseRecords
from flows.rollout.record_file import RecordFolder
from flows.shared import approval, release_events
from flows.shared.approval import ApprovalReply, answer_to
from flows.shared.errors import BadInput
from flows.shared.release_events import finish
from flows.shift_traffic import shift_traffic
from tests.flows.conftest import Script, plan, use, wait_for
from tests.flows.release.test_held_gates import HELD, asked, judged, release
from tests.flows.shared.test_approval import approve, is_asked, questions, waiting
from tests.support.fakes.canary_service import CANDIDATE, FakeService, Refusal
from tests.support.fakes.release_service import ReleaseService
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import ApprovalAnswered, to_mapping
from tuneship.gates.training.training_gates import TrainingVerdict
from tuneship.prefect.connection import disconnect

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
PERSON = {"issuer": "https://login.example", "subject": "u-1", "name": "Eve"}
SAID = {"name": "Eve", "reason": "evidence", "ticket": "CHG-1", "person": PERSON}
EVE = {"decision": "promote", "approver": "Eve", "comment": "evidence, CHG-1", "person": PERSON}


@pytest.fixture
def fake(prefect_api: None, records: Path) -> Iterator[ReleaseService]:
    """A fake service that takes releases."""
    with ReleaseService() as service:
        use(service)
        yield service
    disconnect()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Prefect server that ends with the run, as a plain script starts it."""
    monkeypatch.setattr(approval, "_own_servers", [PREFECT_API_URL.value()])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for answers about gates more often."""
    monkeypatch.setattr(gate_approval, "POLL_SECONDS", 0.1)


def person(act: Callable[[], object]) -> Thread:
    """A person who tries until it is done."""
    thread = Thread(target=lambda: wait_for(lambda: bool(act())))
    thread.start()
    return thread


def answers(service: FakeService, records: Path) -> list[dict[str, Any]]:
    """The answers in the records of all rollouts."""
    folder = RecordFolder(records, service.url)
    facts = [fact for file in folder.of(waiting()) for fact in file.record.facts]
    return [dict(to_mapping(fact)) for fact in facts if isinstance(fact, ApprovalAnswered)]


def check_closed(service: ReleaseService) -> None:
    """Neither place has an open question any more."""
    finish()
    assert list(service.questions.values()) == [None]
    state = questions()[0].state
    assert state is not None
    assert state.is_final()


def test_an_answer_in_the_service_promotes_and_closes_the_question_in_prefect(
    fake: ReleaseService, records: Path
) -> None:
    eve = person(lambda: fake.say("promote", **SAID))
    result = shift_traffic(waiting())
    eve.join()

    assert (result.outcome, result.approval) == ("promoted", EVE)
    assert answers(fake, records) == [{**EVE, "kind": "approval_answered"}]
    check_closed(fake)
    state = questions()[0].state
    assert state is not None
    assert state.is_cancelled()


def test_a_no_in_the_service_rolls_back(fake: ReleaseService, records: Path) -> None:
    eve = person(lambda: fake.say("roll back", **SAID))
    result = shift_traffic(waiting())
    eve.join()
    assert (result.outcome, result.reason) == ("rolled_back", "human_rejected")
    assert [one["approver"] for one in answers(fake, records)] == ["Eve"]
    check_closed(fake)


def test_an_answer_in_prefect_closes_the_question_in_the_service(
    fake: ReleaseService, records: Path
) -> None:
    before = len(questions())

    def act() -> bool:
        if not (is_asked(before) and any(fake.questions.values())):
            return False
        approve(questions()[0])
        return True

    ann = person(act)
    result = shift_traffic(waiting())
    ann.join()
    assert result.outcome == "promoted"
    assert [one["approver"] for one in answers(fake, records)] == ["Ann"]
    check_closed(fake)


def test_answers_in_both_places_within_a_look_count_once(
    fake: ReleaseService, records: Path
) -> None:
    before = len(questions())

    def act() -> bool:
        if not is_asked(before):
            return False
        with fake._lock:  # the flow's next look waits for its first request
            if not fake.say("roll back"):
                return False
            approve(questions()[0])
        return True

    both = person(act)
    result = shift_traffic(waiting())
    both.join()
    (answer,) = answers(fake, records)
    # The look may have read Prefect already when it had to wait.
    assert (answer["approver"], result.outcome) in (("Ann", "promoted"), ("Eve", "rolled_back"))
    check_closed(fake)


def test_a_run_without_a_lasting_prefect_server_is_answered_in_the_service(
    fake: ReleaseService, records: Path, alone: None
) -> None:
    before = len(questions())
    eve = person(lambda: fake.say("promote"))
    result = shift_traffic(waiting())
    eve.join()
    assert result.outcome == "promoted"
    assert len(answers(fake, records)) == 1
    assert len(questions()) == before


@pytest.mark.parametrize("status", [403, 404])
def test_a_run_that_nobody_can_answer_is_refused(
    fake: ReleaseService, alone: None, status: int
) -> None:
    fake.refusal = Refusal(status, "permission_denied")
    with pytest.raises(BadInput, match="PREFECT_API_URL"):
        shift_traffic(waiting())
    assert fake.created == 0


def test_a_killed_run_finds_the_answer_that_the_service_got_meanwhile(
    fake: ReleaseService, records: Path, run: Callable[[CanaryPlan], Script]
) -> None:
    wanted = waiting(look_every_seconds=0.25)
    script = run(wanted)
    wait_for(lambda: any(fake.questions.values()))
    script.process.kill()
    script.process.wait()
    assert fake.say("promote")

    result = shift_traffic(wanted)

    assert result.outcome == "promoted"
    assert [one["approver"] for one in answers(fake, records)] == ["Eve"]


def test_gates_that_hold_are_decided_in_the_service(fake: ReleaseService, records: Path) -> None:
    verdict = TrainingVerdict("hold", HELD.name, (HELD,))
    for said, outcome in (("promote", None), ("roll back", "rejected")):
        eve = person(lambda said=said: fake.say(said, **SAID))
        result, _ = judged(release(f"in the service: {said}"), verdict)
        eve.join()
        assert (result and result.outcome) == outcome
        (record,) = [one for one in ReleaseRecords(records) if one.run_key.endswith(said)]
        held = record.last("held_gates") or {}
        assert (held["approver"], held["comment"]) == ("Eve", "evidence, CHG-1")
        assert held["person"] == PERSON
        (question,) = asked(record.run_key)
        assert question.state is not None
        assert question.state.is_cancelled()


def test_a_repeated_run_asks_about_its_gates_under_the_same_name(
    records: Path, alone: None
) -> None:
    record = ReleaseRecord(records / "one.jsonl")
    now = datetime.now(UTC)
    until = now + timedelta(hours=1)
    record.add("question", now, question="1f", asks=["T8 x"], until=until.isoformat())
    assert record.open_question(["T8 x"], now) == ("1f", until)
    assert record.open_question(["T9 y"], now) is None
    assert record.open_question(["T8 x"], until) is None
    record.add("held_gates", now, said="promote by Ann", comment="")
    assert record.open_question(["T8 x"], now) is None


def test_an_answer_that_comes_too_late_changes_nothing(
    fake: ReleaseService, records: Path, alone: None
) -> None:
    record = ReleaseRecord(records / "releases" / "one.jsonl")
    now = datetime.now(UTC)
    until = now - timedelta(minutes=1)
    record.add("begun", now, run_key="late", endpoint_id=None, endpoint_name="shop")
    record.add("question", now, question="1f", asks=["T8 x"], until=until.isoformat())
    wait_for(lambda: fake.say("promote", at=now.isoformat()))
    assert answer_to("1f", until, now, record.path) == ApprovalReply("timeout")
    fake.say("promote", at=(until - timedelta(minutes=1)).isoformat())
    assert answer_to("1f", until, now, record.path) == ApprovalReply("promote", "Eve")


def test_a_service_that_is_away_for_releases_changes_no_rollout(
    fake: ReleaseService, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Any] = []
    for refusal in (None, Refusal(503, "internal_error"), Refusal(404, "resource_not_found")):
        fake.refusal = refusal
        result = shift_traffic(plan(endpoint_name=f"shop-{len(results)}"))
        finish()
        results.append((result.outcome, [one["verdict"] for one in result.decisions]))
        fake.endpoint = None
        fake.deleted.clear()
        release_events._senders.clear()
    assert results[0][0] == "promoted"
    assert results[0] == results[1] == results[2]
    assert fake.weights.get(CANDIDATE) is None
