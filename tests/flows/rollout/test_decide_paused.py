"""A person ends a paused rollout, and the record says who and why."""

from pathlib import Path

import pytest

from flows.decide_paused import Decision, decide_paused
from flows.rollout.result import RolloutResult
from flows.shared.errors import BadInput
from flows.shift_traffic import shift_traffic
from tests.flows.conftest import plan
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, FakeService

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
ANN = {"decision": "promote", "approver": "Ann", "comment": "the baseline is broken"}


@pytest.fixture
def paused(fake: FakeService, records: Path) -> RolloutResult:
    fake.silent[CANDIDATE] = "zeros"
    wanted = plan(
        max_looks_per_step=6,
        wait_for_traffic="0s",
        on_inconclusive="pause",
        approval_timeout_seconds=5000,
    )
    result = shift_traffic(wanted)
    assert (result.outcome, fake.weights) == ("paused", {BASELINE: 95, CANDIDATE: 5})
    return result


def decided(paused: RolloutResult, decision: str) -> RolloutResult:
    fields = {"approver": "Ann", "reason": "the baseline is broken"}
    return decide_paused(
        Decision.model_validate({"rollout_id": paused.rollout_id, "decision": decision, **fields})
    )


def test_a_person_may_promote_without_proof(fake: FakeService, paused: RolloutResult) -> None:
    result = decided(paused, "promote now")

    assert (result.outcome, result.reason) == ("promoted", "promoted_now")
    assert fake.weights == {BASELINE: 0, CANDIDATE: 100}
    assert fake.endpoint is not None
    assert fake.endpoint["lease"] is None, "nothing takes it back"
    assert fake.deleted == [], "the baseline is kept"
    assert result.approval == ANN
    with pytest.raises(BadInput, match="is not paused"):
        decided(paused, "roll back")


def test_a_person_may_roll_back(fake: FakeService, paused: RolloutResult) -> None:
    result = decided(paused, "roll back")

    assert (result.outcome, result.reason) == ("rolled_back", "human_rejected")
    assert fake.weights == {BASELINE: 100, CANDIDATE: 0}
    assert result.approval == ANN | {"decision": "roll back"}


def test_a_candidate_that_does_not_run_is_not_promoted(
    fake: FakeService, paused: RolloutResult
) -> None:
    fake.arms[CANDIDATE].status = "failed"
    changes = len(fake.patches)

    with pytest.raises(BadInput, match="is not running"):
        decided(paused, "promote now")

    assert len(fake.patches) == changes
    fake.arms[CANDIDATE].status = "running"
    assert decided(paused, "promote now").outcome == "promoted", "it is still paused"


def test_a_split_that_somebody_else_set_is_left_alone(
    fake: FakeService, paused: RolloutResult
) -> None:
    theirs = {BASELINE: 60, CANDIDATE: 40}
    fake.change_from_outside(theirs)
    assert decided(paused, "promote now").reason == "foreign_change"
    assert fake.weights == theirs


def test_an_id_that_is_no_rollout_names_no_file() -> None:
    with pytest.raises(ValueError, match="rollout_id"):
        Decision.model_validate(
            {"rollout_id": "../x", "decision": "roll back", "approver": "A", "reason": "r"}
        )
