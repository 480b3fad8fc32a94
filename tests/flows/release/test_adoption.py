"""A create finds by its tags what its run made earlier, even if idempotency key and records are gone."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect import Task
from prefect.settings import PREFECT_TASKS_REFRESH_CACHE, temporary_settings
from pydantic import SecretStr

from flows.release.record_file import ReleaseRecords
from flows.tune_and_deploy import tune_and_deploy
from tasks.create_once import CREATE_TAG, RUN_TAG, tagged
from tasks.datasets import merge_datasets
from tasks.deployments import create_deployment
from tasks.jobs import create_job
from tests.flows.conftest import in_use
from tests.flows.release.test_retrain import ended, release, write
from tests.support.fakes.canary_service import Refusal
from tests.support.fakes.whole_service import WholeService
from tests.support.service.in_process import Service
from tuneship.contract.datasets import DatasetMerge
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.jobs import JobCreate, JobSummary
from tuneship.prefect.connection import connect, disconnect
from tuneship.settings import ClientSettings
from tuneship.store.records.idempotency import KEPT

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


@pytest.fixture
def lost(prefect_api: None) -> Iterator[None]:
    """Make Prefect forget the stored result of every task."""
    with temporary_settings({PREFECT_TASKS_REFRESH_CACHE: True}):
        yield


@pytest.fixture
def real(lost: None, tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "data") as service:
        service.listen()
        key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        connect(ClientSettings(url=service.url, api_key=SecretStr(key), client_id="alice"))
        yield service
        disconnect()


def wanted(service: Service, kind: str) -> tuple[Task[..., Any], Any, Any]:
    """The task, its argument, and an argument with other content."""
    if kind == "deployment":
        one = DeploymentCreate(model_name="tuneship-tiny", deployment_name="one", tags={"a": "b"})
        return create_deployment, one, one.model_copy(update={"deployment_name": "two"})
    parts = [service.dataset(), service.dataset()]
    if kind == "job":
        job = JobCreate(base_model="tuneship-tiny", dataset_id=parts[0], model_name="m")
        return create_job, job, job.model_copy(update={"dataset_id": parts[1]})
    merge = DatasetMerge(dataset_ids=parts, name="both")
    return merge_datasets, merge, merge.model_copy(update={"dataset_ids": parts[::-1]})


@pytest.mark.parametrize("kind", ["job", "deployment", "merge"])
def test_a_create_adopts_what_its_run_made_days_ago(real: Service, kind: str) -> None:
    create, this, another = wanted(real, kind)
    first = create(this, "run")
    assert first.tags.items() >= this.tags.items()
    assert first.tags[RUN_TAG] == "run"
    real.clock.ahead = 3 * KEPT

    again = create(this, "run")

    assert (again.id, again.tags) == (first.id, first.tags)
    assert create(another, "run").id != first.id


@pytest.mark.parametrize("kind", ["job", "merge"])
def test_another_run_makes_its_own(real: Service, kind: str) -> None:
    create, this, _ = wanted(real, kind)
    assert create(this, "run").id != create(this, "another run").id


def test_a_deployment_that_was_deleted_is_not_adopted(real: Service) -> None:
    create, this, _ = wanted(real, "deployment")
    first = create(this, "run")
    assert real.call("DELETE", f"/v1/deployments/{first.id}").is_success
    real.clock.ahead = KEPT + timedelta(minutes=1)
    assert create(this, "run").id != first.id


def test_a_server_that_knows_no_filter_hands_over_nothing_foreign() -> None:
    moment = "2026-01-05T08:00:00Z"
    fields = {"base_model": "b", "model_name": "m", "status": "queued", "fine_tuning_method": "l"}
    jobs = [
        JobSummary.model_validate(
            {**fields, "id": name, "created_at": moment, "updated_at": moment, "tags": tags}
        )
        for name, tags in {
            "ft_none": {},
            "ft_other": {RUN_TAG: "another", CREATE_TAG: "this"},
            "ft_mine": {RUN_TAG: "run", CREATE_TAG: "this", "more": "too"},
        }.items()
    ]
    found = list(tagged(jobs, {RUN_TAG: "run", CREATE_TAG: "this"}))
    assert [one.id for one in found] == ["ft_mine"]


@pytest.fixture
def bare(
    lost: None, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WholeService]:
    """A fake service without idempotency keys, versions and leases."""
    with in_use(WholeService(), tmp_path / "reports", monkeypatch) as running:
        yield running


def test_a_release_whose_records_are_lost_goes_on_by_its_run_key(
    bare: WholeService, tmp_path: Path, records: Path
) -> None:
    file = write(tmp_path / "data" / "a.jsonl", 0, 80)
    named = release(tmp_path, files=[str(file)]).model_copy(update={"run_key": "mine"})
    bare.losses = lambda _: [2.0, 2.0, 2.0, 2.0]
    assert ended(tune_and_deploy(named)) == "rejected (training_gate)"
    for record in ReleaseRecords(records):
        record.path.unlink()
    bare.losses = lambda _: [2.0, 1.5, 1.2, 1.0]

    assert ended(tune_and_deploy(named)) == "promoted (none)"

    assert len(bare.jobs) == 1


def test_a_create_is_made_when_nothing_can_be_listed(
    bare: WholeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bare.answer

    def without_lists(method: str, path: str, *rest: Any) -> Any:
        if (method, path) == ("GET", "/v1/deployments"):
            raise Refusal(405, "invalid_request_error")
        return whole(method, path, *rest)

    monkeypatch.setattr(bare, "answer", without_lists)
    this = DeploymentCreate(model_name="tuneship-tiny", deployment_name="one")
    assert create_deployment(this, "run").id in bare.models
