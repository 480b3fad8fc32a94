"""Quotas are counted in the transaction that makes the resource: of many requests at the limit exactly one succeeds."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.service.in_process import LINES, Service, jsonl, split
from tuneship.service.context.request_slots import InFlightLimits, RequestSlots

pytestmark = pytest.mark.both_databases(postgres="soak")

Start = Callable[..., Service]
FORM: dict[str, Any] = {
    "data": {"name": "d", "format": "instruction"},
    "files": {"file": ("x", jsonl(*LINES))},
}


def job(service: Service) -> Callable[[int], tuple[str, dict[str, Any]]]:
    body = {"base_model": "tuneship-tiny", "dataset_id": service.dataset(), "model_name": "m"}
    assert service.call("POST", "/v1/fine-tuning/jobs", json=body).status_code == 201
    return lambda _: ("/v1/fine-tuning/jobs", {"json": body})


def deployment(service: Service) -> Callable[[int], tuple[str, dict[str, Any]]]:
    service.deployment("first")
    model = {"model_name": "tuneship-tiny"}
    return lambda number: ("/v1/deployments", {"json": {**model, "deployment_name": f"d{number}"}})


def merge(service: Service) -> Callable[[int], tuple[str, dict[str, Any]]]:
    # Only the quota may refuse merges.
    service.limit(slots=RequestSlots(merges=InFlightLimits(each=64, together=128)))
    body = {"dataset_ids": [service.dataset(), service.dataset()], "name": "m"}
    return lambda _: ("/v1/datasets/merge", {"json": body})


def endpoint(service: Service) -> Callable[[int], tuple[str, dict[str, Any]]]:
    """Create endpoints of both kinds, which count together; a deleted endpoint does not count."""
    deployment = service.deployment("first")
    service.endpoint("first", deployment)
    deleted = service.endpoint("gone", deployment)
    assert service.call("DELETE", f"/v1/endpoints/{deleted}").status_code == 200
    kinds = [
        ("/v1/endpoints", lambda name: {"name": name, "deployment_id": deployment}),
        ("/v1/canary-endpoints", lambda name: split({deployment: 100}, name=name)),
    ]
    return lambda number: (kinds[number % 2][0], {"json": kinds[number % 2][1](f"e{number}")})


@pytest.mark.parametrize(
    ("prepared", "settings"),
    [
        pytest.param(job, {"maximum_active_jobs": 2}, id="jobs"),
        pytest.param(deployment, {"maximum_deployments": 2}, id="deployments"),
        pytest.param(endpoint, {"maximum_endpoints": 2}, id="endpoints"),
        pytest.param(merge, {"maximum_datasets": 3}, id="datasets"),
        pytest.param(merge, {"maximum_dataset_bytes": 4 * len(jsonl(*LINES))}, id="bytes"),
    ],
)
def test_one_of_sixty_four_creates_at_the_quota_succeeds(
    start: Start, prepared: Callable[[Service], Any], settings: dict[str, int]
) -> None:
    service = start(**settings)
    request = prepared(service)

    async def all_at_once() -> list[httpx.Response]:
        requests = [request(number) for number in range(64)]
        asks = [service.ask("POST", path, **options) for path, options in requests]
        return await asyncio.gather(*asks)

    answers = service.run(all_at_once())
    assert Counter(one.status_code for one in answers) == {201: 1, 429: 63}
    for refused in (one for one in answers if one.status_code == 429):
        assert refused.json()["error"]["code"] == "quota_exceeded"
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
    other, options = request(64)
    assert service.call("POST", other, **options).status_code == 429
    assert service.call("GET", "/v1/datasets").status_code == 200


def test_a_refused_upload_leaves_no_file(start: Start) -> None:
    service = start(maximum_datasets=1)
    service.dataset()
    folder = service.settings.data_dir / "blobs" / "datasets"
    before = sorted(folder.iterdir())
    refused = service.call("POST", "/v1/datasets", **FORM)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert sorted(folder.iterdir()) == before
    assert list((service.settings.data_dir / "scratch").iterdir()) == []


def test_a_quota_is_each_tenants_own(start: Start) -> None:
    service = start(maximum_datasets=1)
    answers = [
        service.call("POST", "/v1/datasets", tenant, **FORM) for tenant in ("alice", "bob", "bob")
    ]
    assert [one.status_code for one in answers] == [201, 201, 429]


def test_the_bytes_of_one_dataset_alone_can_be_too_many(start: Start) -> None:
    service = start(maximum_dataset_bytes=10)
    refused = service.call("POST", "/v1/datasets", **FORM)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
