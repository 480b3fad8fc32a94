"""The clean-up after an unsuccessful release deletes what the release made and never touches anything else."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed

from flows.release.clean_up import discard_deployments
from flows.release.closing import clean_up, result_of_record
from flows.release.record_file import ReleaseRecord, ReleaseRecords
from flows.release.release_run import RESULT_FILE, report_folder
from flows.tune_and_deploy import tune_and_deploy
from tests.flows.conftest import use
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, FakeService

pytestmark = pytest.mark.prefect
NOW = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)


def begun(records: Path, flow_run_id: UUID | None = None, **made: str) -> ReleaseRecord:
    record = ReleaseRecords(records).of("d" * 64, None)
    where = {"endpoint_id": None, "endpoint_name": "shop"}
    record.add("begun", NOW, run_key="k", flow_run_id=str(flow_run_id), **where)
    for kind, resource_id in made.items():
        record.add(kind, NOW, id=resource_id)
    return record


def test_a_candidate_without_traffic_goes_and_its_baseline_stays(
    fake: FakeService, records: Path
) -> None:
    fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
    assert discard_deployments(begun(records, candidate=CANDIDATE, baseline=BASELINE)) == []
    assert fake.deleted == [CANDIDATE]


def test_a_candidate_with_traffic_is_kept_and_reported(fake: FakeService, records: Path) -> None:
    fake.make_endpoint({BASELINE: 75, CANDIDATE: 25})
    kept = discard_deployments(begun(records, candidate=CANDIDATE))
    assert kept == [f"deployment {CANDIDATE} is kept: it has traffic"]
    assert fake.deleted == []


def test_the_only_healthy_copy_is_never_deleted(fake: FakeService, records: Path) -> None:
    fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
    fake.arms[BASELINE].status = "failed"
    kept = discard_deployments(begun(records, candidate=CANDIDATE))
    assert kept == [f"deployment {CANDIDATE} is kept: the baseline is failed"]


def test_without_an_endpoint_both_deployments_of_the_run_go(
    fake: FakeService, records: Path
) -> None:
    assert discard_deployments(begun(records, candidate=CANDIDATE, baseline=BASELINE)) == []
    assert fake.deleted == [CANDIDATE, BASELINE]


def test_a_service_that_does_not_answer_leaves_everything(fake: FakeService, records: Path) -> None:
    record = begun(records, candidate=CANDIDATE)
    fake.__exit__()
    use(fake)  # without the connection by which the record was offered
    kept = discard_deployments(record)
    assert kept == ["deployments of this run are kept: ServiceUnreachable"]


def test_the_hook_works_by_keyword_from_the_record_alone_and_twice(
    fake: FakeService, records: Path
) -> None:
    fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
    flow_run = FlowRun(flow_id=uuid4(), parameters={})
    record = begun(records, flow_run.id, candidate=CANDIDATE)
    for _ in range(2):
        clean_up(flow=tune_and_deploy, flow_run=flow_run, state=Crashed())
    assert fake.deleted == [CANDIDATE]
    ended = [fact for fact in ReleaseRecord(record.path).facts if fact["kind"] == "ended"]
    assert [fact["outcome"] for fact in ended] == ["aborted"]


def test_the_hook_leaves_the_record_open_where_the_service_does_not_answer(
    fake: FakeService, records: Path
) -> None:
    flow_run = FlowRun(flow_id=uuid4(), parameters={})
    record = begun(records, flow_run.id, candidate=CANDIDATE)
    fake.__exit__()
    use(fake)
    clean_up(flow=tune_and_deploy, flow_run=flow_run, state=Crashed())
    assert not ReleaseRecord(record.path).has_ended, (
        "the next run, or the guard, finds the candidate"
    )


def _no_reports(record: ReleaseRecord) -> Path:
    reports = report_folder(record).parent
    reports.parent.mkdir(parents=True, exist_ok=True)
    reports.write_text("no folder")
    return report_folder(record) / RESULT_FILE


def _result(text: str) -> Callable[[ReleaseRecord], Path]:
    def spoil(record: ReleaseRecord) -> Path:
        report_folder(record).mkdir(parents=True)
        file = report_folder(record) / RESULT_FILE
        file.write_text(text)
        return file

    return spoil


def _training(record: ReleaseRecord) -> Path:
    record.training_file.write_text("{")
    return record.training_file


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(_no_reports, id="no folder of reports"),
        pytest.param(_result('{"outcome": "abo'), id="half a result"),
        pytest.param(_result("{}"), id="a result of nothing"),
        pytest.param(_training, id="half a record of the training"),
    ],
)
def test_the_hook_deletes_whatever_the_files_beside_the_record_hold(
    fake: FakeService, records: Path, spoil: Callable[[ReleaseRecord], Path]
) -> None:
    fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
    flow_run = FlowRun(flow_id=uuid4(), parameters={})
    record = begun(records, flow_run.id, candidate=CANDIDATE)
    file = spoil(record)
    notes = result_of_record(record, "stopped", []).notes
    clean_up(flow=tune_and_deploy, flow_run=flow_run, state=Crashed())
    assert fake.deleted == [CANDIDATE]
    assert ReleaseRecord(record.path).has_ended
    assert [note.partition(" (")[0] for note in notes] == [f"{file} cannot be read"]


def test_the_hook_leaves_a_run_that_has_ended_alone(fake: FakeService, records: Path) -> None:
    fake.make_endpoint({BASELINE: 0, CANDIDATE: 100})
    flow_run = FlowRun(flow_id=uuid4(), parameters={})
    record = begun(records, flow_run.id, candidate=CANDIDATE)
    record.add("ended", NOW, outcome="promoted", reason="none")
    clean_up(flow=tune_and_deploy, flow_run=flow_run, state=Crashed())
    assert fake.deleted == []


def test_every_hook_of_the_chain_is_the_clean_up() -> None:
    hooks = (
        tune_and_deploy.on_failure_hooks,
        tune_and_deploy.on_crashed_hooks,
        tune_and_deploy.on_cancellation_hooks,
    )
    assert all(chosen == [clean_up] for chosen in hooks)
