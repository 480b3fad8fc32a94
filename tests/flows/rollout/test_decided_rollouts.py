"""A person pauses, resumes or reverts a rollout at the service: its driver holds, goes on, or ends it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.decide_paused import Decision, decide_paused
from flows.guard import guard
from flows.rollout.record_file import RecordFolder
from flows.shared.errors import BadInput
from flows.shift_traffic import shift_traffic
from tests.flows.conftest import Script, plan, slow_plan, wait_for
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, FakeService
from tests.system.faults.stage import Stage
from tuneship.contract.endpoints import CanaryDecision
from tuneship.gates.canary import replay
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import ApprovalAnswered, Resumed, to_mapping

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
RETURNED = {BASELINE: 100, CANDIDATE: 0}
ANN = {"issuer": "https://login.example", "subject": "u-1", "name": "Ann"}


def applied(service: FakeService) -> list[int]:
    return [patch.weights.get(CANDIDATE, 0) for patch in service.patches if patch.status == 200]


def test_a_pause_holds_the_split_beyond_the_plan_s_looks_and_is_lifted(
    fake: FakeService, records: Path
) -> None:
    wanted = plan(steps=[50, 100], max_looks_per_step=12, max_looks=12, wait_for_traffic="0s")
    fake.at_tick[3] = lambda: fake.decide("pause")
    fake.at_tick[30] = lambda: fake.decide("resume")

    result = shift_traffic(wanted)

    assert (result.outcome, applied(fake)) == ("promoted", [50, 80, 100])
    assert fake.patches[1].tick > 30
    record = RecordFolder(records, fake.url).of(wanted)[-1].record
    assert sum(isinstance(fact, Resumed) for fact in record.facts) == 1
    assert 24 <= sum(look.is_paused for look in record.looks) <= 28
    assert all(recorded == decided for recorded, decided in replay(record))


@pytest.mark.parametrize("weight", [80, 100])
def test_a_pause_in_mid_shift_refuses_it_and_is_no_failure(fake: FakeService, weight: int) -> None:
    """The pause comes between the look that decides the shift and the shift."""

    def pause_before_the_shift() -> None:
        seen = fake.weights[CANDIDATE]
        fake.before_patch = lambda: fake.decide("pause")
        assert seen == before

    before = {80: 50, 100: 80}[weight]
    fake.at_tick[3 if weight == 80 else 20] = pause_before_the_shift
    fake.at_tick[40] = lambda: fake.decide("resume")

    result = shift_traffic(plan(steps=[50, 100], bake_looks=20))

    assert (result.outcome, applied(fake)) == ("promoted", [50, 80, 100])
    refused = [patch for patch in fake.patches if patch.status == 409]
    assert [patch.weights[CANDIDATE] for patch in refused] == [weight]
    assert next(p.tick for p in fake.patches if p.weights[CANDIDATE] == weight) < 40
    assert max(p.tick for p in fake.patches if p.weights[CANDIDATE] == weight) > 40


def test_a_pause_at_the_last_moment_keeps_the_lease_and_both_deployments(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is decided, and only the end of the lease is left."""
    real, paused_at = fake.answer, list[int]()

    def answer(method: str, path: str, query: Any, body: Any, headers: Any) -> Any:
        if path.endswith("/lease") and body == {"seconds": 0} and not paused_at:
            paused_at.append(fake.ticks)
            fake.decide("pause")
            fake.at_tick[fake.ticks + 5] = lambda: fake.decide("resume")
        return real(method, path, query, body, headers)

    monkeypatch.setattr(fake, "answer", answer)
    result = shift_traffic(plan(steps=[50, 100]))

    assert (result.outcome, fake.deleted) == ("promoted", [BASELINE])
    assert fake.ticks > paused_at[0] + 5
    assert fake.weights[CANDIDATE] == 100


def test_a_candidate_that_fails_in_a_pause_is_returned(
    fake: FakeService,
) -> None:
    fake.at_tick[3] = lambda: fake.decide("pause")
    fake.arms[CANDIDATE].error_share = lambda bucket, _: 0.3 if bucket > 10 else 0.003

    result = shift_traffic(plan(steps=[50, 100]))

    assert (result.outcome, result.reason) == ("rolled_back", "crash")
    assert fake.weights == RETURNED
    assert fake.endpoint is not None
    assert fake.endpoint["paused"] is None


def test_a_killed_run_finds_the_pause_that_it_left(
    fake: FakeService, run: Callable[[CanaryPlan], Script], records: Path
) -> None:
    wanted = slow_plan()
    script = run(wanted)
    wait_for(lambda: fake.weights.get(CANDIDATE) == 50)
    fake.decide("pause")
    script.process.kill()
    script.process.wait()
    known = len(RecordFolder(records, fake.url).of(wanted)[-1].record.looks)
    fake.at_tick[fake.ticks + 20] = lambda: fake.decide("resume")

    result = shift_traffic(wanted)

    assert result.outcome == "promoted"
    record = RecordFolder(records, fake.url).of(wanted)[-1].record
    assert all(look.is_paused for look in record.looks[known : known + 15])
    assert all(recorded == decided for recorded, decided in replay(record))


def test_a_lease_that_lapses_in_a_pause_ends_the_rollout(
    fake: FakeService, run: Callable[[CanaryPlan], Script]
) -> None:
    wanted = slow_plan()
    script = run(wanted)
    wait_for(lambda: fake.weights.get(CANDIDATE) == 50)
    fake.decide("pause")
    script.process.kill()
    script.process.wait()
    fake.revert()

    result = shift_traffic(wanted)

    assert (result.outcome, result.reason) == ("rolled_back", "lease_expired")
    assert fake.weights == RETURNED


@pytest.mark.parametrize("way", ["hold", "shift", "pause"])
def test_a_person_s_revert_ends_the_rollout_as_rejected(
    fake: FakeService, records: Path, way: str
) -> None:
    """In a shift, the driver's condition no longer holds: it reads the split before it calls that a foreign change."""

    def revert() -> None:
        fake.decide("revert", "Ann", reason="safety", ticket="CHG-1", person=ANN)

    if way == "hold":
        fake.at_tick[5] = revert
    elif way == "shift":
        fake.at_tick[3] = lambda: setattr(fake, "before_patch", revert)
    else:
        fake.at_tick[3] = lambda: fake.decide("pause")
        fake.at_tick[9] = revert

    wanted = plan(steps=[50, 100])
    result = shift_traffic(wanted)

    assert (result.outcome, result.reason) == ("rolled_back", "human_rejected")
    said = {"decision": "roll back", "approver": "Ann", "comment": "safety, CHG-1", "person": ANN}
    assert result.approval == said
    (file,) = RecordFolder(records, fake.url).of(wanted)
    answers = [fact for fact in file.record.facts if isinstance(fact, ApprovalAnswered)]
    assert [dict(to_mapping(one)) for one in answers] == [{**said, "kind": "approval_answered"}]
    assert (fake.weights, applied(fake), fake.deleted) == (RETURNED, [50], [])


def test_a_first_shift_that_was_reverted_is_not_sent_again(
    fake: FakeService, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after its first shift and before its answer, the run does not know that it had traffic."""
    wanted = plan(steps=[50, 100])
    with monkeypatch.context() as killed:

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        killed.setattr("flows.rollout.split.RolloutSplit.confirm", die)
        killed.setattr("flows.rollout.rollback.abort", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            shift_traffic(wanted)
    (file,) = RecordFolder(records, fake.url).of(wanted)
    assert (file.record.weight, fake.weights[CANDIDATE]) == (0, 50)
    fake.decide("revert")

    result = shift_traffic(wanted)

    assert (result.outcome, result.reason) == ("rolled_back", "human_rejected")
    assert applied(fake) == [50]
    # Another rollout of this endpoint is not stopped by what was decided about the one before.
    assert shift_traffic(wanted).outcome == "promoted"


@pytest.fixture
def waiting(fake: FakeService, records: Path) -> CanaryPlan:
    """A rollout that has ended `paused`, so that nobody drives it."""
    fake.silent[CANDIDATE] = "zeros"
    wanted = plan(
        max_looks_per_step=6,
        wait_for_traffic="0s",
        on_inconclusive="pause",
        approval_timeout_seconds=5000,
    )
    assert shift_traffic(wanted).outcome == "paused"
    return wanted


def test_the_guard_writes_the_end_of_a_rollout_that_a_person_reverted(
    fake: FakeService, records: Path, waiting: CanaryPlan
) -> None:
    assert guard().outcome == "nothing_to_do"
    fake.decide("revert")
    ends = [(one.outcome, one.reason) for one in guard().rollouts]
    assert ends == [("rolled_back", "human_rejected")]
    (file,) = RecordFolder(records, fake.url).of(waiting)
    assert not file.is_open
    assert guard().outcome == "nothing_to_do"


def test_a_paused_endpoint_is_resumed_before_a_person_promotes_from_here(
    fake: FakeService, records: Path, waiting: CanaryPlan
) -> None:
    (file,) = RecordFolder(records, fake.url).of(waiting)
    fake.decide("pause")
    fields = {"approver": "Ann", "reason": "the baseline is broken", "decision": "promote now"}
    decision = Decision.model_validate({"rollout_id": file.path.stem, **fields})
    with pytest.raises(BadInput, match="resume it"):
        decide_paused(decision)
    assert file.is_paused
    fake.decide("resume")
    assert decide_paused(decision).outcome == "promoted"


def test_a_service_that_knows_no_pause_is_sent_no_such_field(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fake.answer

    def answer(*given: Any) -> Any:
        status, body = real(*given)
        for name in ("paused", "reverted"):
            body.pop(name, None)
        return status, body

    monkeypatch.setattr(fake, "answer", answer)
    assert shift_traffic(plan(steps=[50, 100])).outcome == "promoted"
    assert all("pausable" not in (patch.lease or {}) for patch in fake.patches)


@pytest.fixture
def stage(prefect_api: None, records: Path, tmp_path: Path) -> Iterator[Stage]:
    """The real service, with both deployments and their endpoint."""
    with Stage(tmp_path) as created:
        created.set_up()
        yield created


def test_the_service_holds_lets_go_and_takes_back_what_the_driver_does(stage: Stage) -> None:
    canaries, ann = stage.direct.canary_endpoints, CanaryDecision(name="Ann")
    looks_of_pause = range(4, 30)
    for look, verb in ((4, canaries.pause), (30, canaries.resume)):
        stage.at_tick[look] = lambda verb=verb: verb(stage.endpoint, ann)

    result = shift_traffic(stage.plan(max_looks_per_step=12, max_looks=60))

    assert (result.outcome, stage.seen) == ("promoted", [0, 25, 50, 100])
    paused = [one["look"] for one in result.decisions if "paused" in one.get("reasons", [])]
    assert paused[0] <= looks_of_pause.start + 2
    assert len(paused) == len(looks_of_pause)


def test_the_service_takes_the_traffic_back_for_a_person_in_the_bake(stage: Stage) -> None:
    canaries, ann = stage.direct.canary_endpoints, CanaryDecision(name="Ann", reason="safety")

    def revert() -> None:
        if stage.weight == 100:
            canaries.revert(stage.endpoint, ann)

    stage.at_tick |= dict.fromkeys(range(1, 60), revert)
    result = shift_traffic(stage.plan(bake_looks=20))

    assert (result.outcome, result.reason) == ("rolled_back", "human_rejected")
    assert (stage.weight, stage.seen) == (0, [0, 25, 50, 100])
    found = canaries.get(stage.endpoint)
    assert found.reverted is not None
    assert (found.reverted.by, found.reverted.reason) == ("Ann", "safety")
