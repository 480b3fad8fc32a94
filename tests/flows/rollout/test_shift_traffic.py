"""The worked scenarios of a rollout, checked by the result and by the split as the service sees it."""

from itertools import pairwise
from pathlib import Path

import pytest

from flows.rollout.record_file import RecordFolder
from flows.rollout.result import RollbackIncomplete
from flows.shift_traffic import shift_traffic
from tests.flows.conftest import plan, use
from tests.support.fakes.canary_service import BASELINE, BUCKET, CANDIDATE, EPOCH, Arm, FakeService
from tuneship.gates.record import Begun, SplitConfirmed, SplitIntended

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


def candidate_weights(service: FakeService) -> list[int]:
    """The candidate's weight after each applied change, in order."""
    return [patch.weights.get(CANDIDATE, 0) for patch in service.patches if patch.status == 200]


def test_equal_deployments_are_promoted_step_by_step(fake: FakeService) -> None:
    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("promoted", "none")
    assert candidate_weights(fake) == [5, 25, 50, 75, 80, 100]
    assert fake.deleted == [BASELINE]
    assert fake.weights == {BASELINE: 0, CANDIDATE: 100}
    ticks = [patch.tick for patch in fake.patches]
    assert all(later - earlier >= 5 for earlier, later in pairwise(ticks[:-1]))
    assert [change.weights[CANDIDATE] for change in result.history] == [5, 25, 50, 75, 80, 100]


def test_requests_before_a_late_shift_belong_to_the_weight_before(fake: FakeService) -> None:
    """A shift may come long after the look that decided it, e.g. because Prefect was away."""

    def be_away_before_the_shift() -> None:
        fake.before_patch = lambda: fake.tick(40)

    fake.at_tick[3] = be_away_before_the_shift

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("promoted", "none")
    late = fake.patches[1]
    assert (late.weights[CANDIDATE], late.tick > 40) == (25, True)
    assert result.history[1].at == EPOCH + late.tick * BUCKET


def test_errors_from_the_second_step_return_the_traffic_at_once(fake: FakeService) -> None:
    fake.arms[CANDIDATE] = Arm(error_share=lambda _, weight: 0.2 if weight >= 25 else 0.003)

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("rolled_back", "error_rate")
    assert candidate_weights(fake) == [5, 25, 0]
    burst, back = fake.patches[1].tick, fake.patches[2].tick
    assert back - burst <= 3
    assert fake.deleted == []


def test_a_slow_candidate_is_returned_for_its_latency(fake: FakeService) -> None:
    fake.arms[CANDIDATE] = Arm(percentiles_ms=(440.0, 1800.0, 4500.0))

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("rolled_back", "latency")
    assert candidate_weights(fake)[-1] == 0
    assert fake.weights[BASELINE] == 100


@pytest.mark.parametrize("silence", ["zeros", "empty", "nulls"])
def test_a_candidate_without_requests_is_held_not_promoted(fake: FakeService, silence: str) -> None:
    fake.silent[CANDIDATE] = silence

    result = shift_traffic(plan(max_looks_per_step=15, wait_for_traffic="0s"))

    assert (result.outcome, result.reason) == ("rolled_back", "insufficient_data")
    assert candidate_weights(fake) == [5, 0]


def test_metrics_that_are_down_for_three_looks_only_hold(fake: FakeService) -> None:
    fake.metrics_down = lambda tick: 4 <= tick < 7

    result = shift_traffic(plan(steps=[50, 100]))

    assert result.outcome == "promoted"
    assert candidate_weights(fake) == [50, 80, 100]
    held = [one for one in result.decisions if one.get("missing")]
    assert [one["verdict"] for one in held] == ["hold"] * 3


@pytest.mark.parametrize("fault", ["lose", "fail", "twice"])
def test_the_last_step_converges_whatever_happens_to_its_answer(
    fake: FakeService, fault: str
) -> None:
    fake.patch_script = ["ok", "ok", fault]

    result = shift_traffic(plan(steps=[50, 100]))

    assert result.outcome == "promoted"
    assert fake.weights == {BASELINE: 0, CANDIDATE: 100}
    assert candidate_weights(fake) == [50, 80, 100]
    assert fake.deleted == [BASELINE]


def test_every_shift_carries_if_match_and_a_lease_but_never_an_idempotency_key(
    fake: FakeService,
) -> None:
    fake.arms[CANDIDATE] = Arm(error_share=lambda _, weight: 0.2 if weight >= 25 else 0.003)

    shift_traffic(plan())

    *shifts, back = fake.patches
    fallback = [
        {"id": BASELINE, "traffic_percentage": 100},
        {"id": CANDIDATE, "traffic_percentage": 0},
    ]
    assert all(patch.if_match for patch in fake.patches)
    assert all(patch.idempotency_key is None for patch in fake.patches)
    lease = {"seconds": 600, "fallback": fallback, "pausable": True}
    assert all(patch.lease == lease for patch in shifts)
    assert back.lease is None


def test_a_bare_server_is_shifted_with_plain_changes_and_the_result_says_so(
    prefect_api: None, records: Path
) -> None:
    with FakeService(extensions=False) as bare:
        use(bare)
        result = shift_traffic(plan(quality_gates=None, steps=[25, 50, 100]))

    assert result.outcome == "promoted"
    assert [one for one in candidate_weights(bare) if one != 25][:2] == [50, 80]
    assert all(patch.if_match is None and patch.lease is None for patch in bare.patches)
    assert any("leases" in note for note in result.notes)


def test_blank_answers_that_only_the_driver_sees_return_the_traffic(
    prefect_api: None, records: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    traffic = {"prompts": str(prompts), "requests_per_second": 200.0}
    with FakeService(Arm(empty_share=0.5), extensions=False, seconds_per_bucket=0.05) as bare:
        use(bare)
        result = shift_traffic(plan(steps=[50, 100], look_every_seconds=0.1, traffic=traffic))

    assert (result.outcome, result.reason) == ("rolled_back", "quality")
    assert bare.weights[BASELINE] == 100
    (record,) = RecordFolder(records, bare.url).of(plan())
    assert "hello" not in record.path.read_text()


def test_a_lease_that_ran_out_ends_as_rolled_back(fake: FakeService) -> None:
    fake.at_tick[7] = fake.revert

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("rolled_back", "lease_expired")
    assert candidate_weights(fake) == [5, 25]
    assert fake.weights == {BASELINE: 100, CANDIDATE: 0}
    assert result.history[-1].weights == {BASELINE: 100, CANDIDATE: 0}


def test_a_split_that_somebody_else_set_is_left_alone(fake: FakeService) -> None:
    theirs = {BASELINE: 60, CANDIDATE: 40}
    fake.at_tick[7] = lambda: fake.change_from_outside(theirs)

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("aborted", "foreign_change")
    assert fake.weights == theirs


def test_an_endpoint_that_is_not_at_rest_is_refused(fake: FakeService) -> None:
    fake.make_endpoint({BASELINE: 70, CANDIDATE: 30})

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("rejected", "foreign_change")
    assert fake.patches == []


def test_an_endpoint_under_somebody_elses_lease_is_refused(fake: FakeService) -> None:
    fake.make_endpoint({BASELINE: 100, CANDIDATE: 0}, lease_seconds=600)

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("rejected", "rollout_in_progress")
    assert fake.patches == []


def test_the_loser_of_the_race_for_the_first_step_moves_nothing(fake: FakeService) -> None:
    fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
    fake.before_patch = lambda: fake.change_from_outside({BASELINE: 95, CANDIDATE: 5})

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("rejected", "rollout_in_progress")
    assert [patch.status for patch in fake.patches] == [412]


def test_a_failed_candidate_is_returned(fake: FakeService) -> None:
    fake.at_tick[8] = lambda: setattr(fake.arms[CANDIDATE], "status", "failed")

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("rolled_back", "candidate_failed")
    assert fake.weights[BASELINE] == 100


def test_without_a_baseline_no_rollback_is_possible(fake: FakeService) -> None:
    fake.at_tick[8] = lambda: fake.deleted.append(BASELINE)

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("aborted", "baseline_missing")
    assert candidate_weights(fake) == [5, 25]
    assert fake.endpoint is not None
    assert fake.endpoint["lease"] is None


def test_a_return_that_cannot_be_confirmed_fails_the_run_and_keeps_the_record_open(
    fake: FakeService,
) -> None:
    fake.arms[CANDIDATE] = Arm(error_share=lambda _, weight: 0.5 if weight >= 25 else 0.003)
    fake.patch_script = ["ok", "ok"] + ["fail"] * 60

    with pytest.raises(RollbackIncomplete) as raised:
        shift_traffic(plan())

    assert raised.value.result.outcome == "rollback_incomplete"
    assert fake.deleted == []

    fake.patch_script = []
    again = shift_traffic(plan())
    assert (again.outcome, again.reason) == ("rolled_back", "error_rate")
    assert fake.weights[BASELINE] == 100


def test_a_candidate_that_is_still_starting_is_waited_for(fake: FakeService) -> None:
    fake.arms[CANDIDATE].status = "creating"
    fake.after_reads[CANDIDATE] = (3, lambda: setattr(fake.arms[CANDIDATE], "status", "running"))

    assert shift_traffic(plan(steps=[50, 100])).outcome == "promoted"


def test_a_candidate_that_failed_to_start_is_refused(fake: FakeService) -> None:
    fake.arms[CANDIDATE].status = "failed"

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("rejected", "candidate_failed")
    assert fake.created == 0


def test_an_open_rollout_of_another_plan_blocks_until_its_lease_has_returned_the_traffic(
    fake: FakeService,
) -> None:
    fake.silent[CANDIDATE] = "zeros"
    left = shift_traffic(plan(max_looks_per_step=6, wait_for_traffic="0s", on_inconclusive="pause"))
    assert left.outcome == "paused"
    del fake.silent[CANDIDATE]

    other = plan(steps=[50, 100])
    assert shift_traffic(other).reason == "rollout_in_progress"
    assert fake.weights[CANDIDATE] == 5

    fake.revert()
    assert shift_traffic(other).outcome == "promoted"


def test_looks_that_are_used_up_can_pause_for_a_person(fake: FakeService) -> None:
    fake.silent[CANDIDATE] = "zeros"
    paused = plan(
        max_looks_per_step=8,
        wait_for_traffic="0s",
        on_inconclusive="pause",
        approval_timeout_seconds=5000,
    )

    result = shift_traffic(paused)

    assert (result.outcome, result.reason) == ("paused", "insufficient_data")
    assert fake.weights == {BASELINE: 95, CANDIDATE: 5}
    assert fake.renewed_for == 5000

    del fake.silent[CANDIDATE]
    assert shift_traffic(paused).outcome == "promoted"
    assert fake.created == 1
    assert candidate_weights(fake) == [5, 25, 50, 75, 80, 100]


def test_a_damaged_record_refuses_its_own_endpoint_and_no_other(
    fake: FakeService, records: Path
) -> None:
    other = RecordFolder(records, fake.url).new(plan(endpoint_name="other"))
    wanted = plan(endpoint_name="other")
    begun = Begun("rollout-1", "cep_other", wanted.model_dump(mode="json"), wanted.digest(), ())
    other.append(begun, SplitIntended(5, "first step"), SplitConfirmed(5))
    other.path.write_text(other.path.read_text().replace('"split_intended"', '"split_'))

    refused = shift_traffic(wanted)
    result = shift_traffic(plan())

    assert (refused.outcome, refused.reason) == ("rejected", "record_damaged")
    assert refused.endpoint_id == "cep_other"
    assert str(other.path) in refused.notes[0]
    assert result.outcome == "promoted"
