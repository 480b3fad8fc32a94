"""The whole service keeps its files in a bucket of a real S3 server, which stops and returns."""

import logging
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import obstore
import pytest

from tests.support.objects.files import contents_below
from tests.support.objects.object_server import ObjectServer
from tests.support.service.in_process import LINES, Service, jsonl

pytestmark = pytest.mark.slow

GENERATE = {"prompt": "What is case 1?", "max_tokens": 8}


@pytest.fixture
def service(start: Callable[..., Service], bucket: str) -> Service:
    return start(blob_url=bucket)


@pytest.fixture
def away(object_server: ObjectServer) -> Iterator[Callable[[], None]]:
    """Stop the server; it runs again after the test at the latest."""
    yield object_server.stop
    if object_server.process.poll() is not None:
        object_server.start()


def upload(service: Service) -> Any:
    files = {"file": ("x.jsonl", jsonl(*LINES), "application/jsonl")}
    form = {"name": "d", "format": "instruction"}
    return service.call("POST", "/v1/datasets", data=form, files=files)


def generated(service: Service, deployment: str) -> int:
    return service.call("POST", f"/v1/deployments/{deployment}/generate", json=GENERATE).status_code


def prefixes(server: ObjectServer, bucket: str) -> set[str]:
    return {one.rpartition("/")[0] for one in server.objects(bucket)}


@pytest.mark.essential
def test_everything_is_kept_read_and_removed_there(
    service: Service, bucket: str, object_server: ObjectServer
) -> None:
    one, two = service.dataset(), service.dataset()
    merge = {"name": "both", "dataset_ids": [one, two]}
    merged = service.call("POST", "/v1/datasets/merge", json=merge)
    assert merged.status_code == 201, merged.text
    both = merged.json()["id"]
    tuned = service.model()
    row = service.call("GET", f"/v1/models/{tuned}").json()
    model = f"models/{row['fine_tuning_job_id']}-1"
    stored = prefixes(object_server, bucket)
    assert {f"datasets/{name}" for name in (one, two, both)} | {model} <= stored
    assert contents_below(service.settings.data_dir / "blobs") == {}
    copies = contents_below(service.settings.data_dir / "cache")
    assert copies, "what was uploaded is its own copy"
    assert not any(b"case 1" in content for content in copies.values())

    # The local copies are only copies and can be deleted.
    for kind in ("datasets", "models"):
        for folder in (service.settings.data_dir / "cache" / "objects" / kind).iterdir():
            shutil.rmtree(folder)
    deployment = service.deployment("d", model_name=tuned)
    assert generated(service, deployment) == 200
    again = service.call("POST", "/v1/datasets/merge", json={**merge, "name": "again"})
    assert again.status_code == 201, again.text

    assert service.call("DELETE", f"/v1/deployments/{deployment}").status_code == 200
    service.until(lambda: service.deployment_status(deployment) == "deleted")
    assert service.call("DELETE", f"/v1/models/{tuned}").status_code == 200
    listed = service.call("GET", "/v1/datasets?limit=100").json()["datasets"]
    for dataset in listed:
        assert service.call("DELETE", f"/v1/datasets/{dataset['id']}").status_code == 200
    assert prefixes(object_server, bucket) == set()
    assert contents_below(service.settings.data_dir / "cache" / "objects") == {}


def test_without_the_server_generation_and_reads_go_on_and_the_rest_is_tried_again(
    service: Service, object_server: ObjectServer, away: Callable[[], None]
) -> None:
    tuned, other = service.model(), service.model()
    deployment = service.deployment("d", model_name=tuned)
    training = service.job()
    trainer = service.trainer_of(training)
    trainer.start_of(1)

    away()
    refused = upload(service)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "internal_error")
    assert int(refused.headers["retry-after"]) > 0
    assert object_server.address not in refused.text
    assert generated(service, deployment) == 200
    assert service.call("GET", f"/v1/models/{tuned}").status_code == 200
    assert service.call("GET", "/readyz", None).status_code == 200
    trainer.complete()
    body = {"model_name": other, "deployment_name": "comes"}
    created = service.call("POST", "/v1/deployments", json=body)
    assert created.status_code == 503, created.text
    assert int(created.headers["retry-after"]) > 0
    service.until(lambda: any("the object store failed" in line for line in service.log.texts))
    assert service.job_status(training) == "running"
    assert not any(object_server.address in line for line in service.log.texts)

    object_server.start()
    service.clock.ahead += timedelta(seconds=31)
    assert upload(service).status_code == 201
    service.until(lambda: service.job_status(training) == "completed")
    deployed = service.deployment("comes", model_name=other)
    assert generated(service, deployed) == 200


def forget_copies(service: Service, model: str) -> None:
    job = service.call("GET", f"/v1/models/{model}").json()["fine_tuning_job_id"]
    shutil.rmtree(service.parts.blobs.path_of(f"models/{job}-1"))


@pytest.mark.soak
def test_a_replica_that_starts_without_the_server_is_no_failure_of_its_deployment(
    service: Service, object_server: ObjectServer, away: Callable[[], None]
) -> None:
    tuned = service.model()
    deployment = service.deployment("d", model_name=tuned)
    forget_copies(service, tuned)
    away()
    service.engines.replicas[-1].kill()
    service.until(lambda: generated(service, deployment) == 503)
    for _ in range(5):
        service.clock.ahead += timedelta(seconds=31)
        assert service.deployment_status(deployment) == "running"
        assert generated(service, deployment) == 503
    object_server.start()
    service.clock.ahead += timedelta(seconds=31)
    service.until(lambda: generated(service, deployment) == 200)


def test_an_object_without_a_row_is_set_aside_after_a_day_and_no_other(
    service: Service, bucket: str, object_server: ObjectServer, caplog: pytest.LogCaptureFixture
) -> None:
    kept = service.dataset()
    obstore.put(object_server.store(bucket), "datasets/ds_left/data.jsonl", b"of a killed upload")
    with caplog.at_level(logging.WARNING):
        service.clock.ahead += timedelta(hours=23)
        service.run(service.supervisor.leader_work.retention.sweep_files())
        assert "datasets/ds_left" in prefixes(object_server, bucket)
        service.clock.ahead += timedelta(hours=2)
        service.until(lambda: "datasets/ds_left" not in prefixes(object_server, bucket))
    assert {f"datasets/{kept}"} == {
        one for one in prefixes(object_server, bucket) if not one.startswith("set-aside")
    }
    assert any(one.endswith("/datasets/ds_left") for one in prefixes(object_server, bucket))
    service.until(lambda: any("without a row were moved" in line for line in service.log.texts))
