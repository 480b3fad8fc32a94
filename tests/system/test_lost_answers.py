"""The typed client creates nothing twice on a network that loses answers after the service has acted."""

import io
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from tests.support.service.in_process import LINES, Service, jsonl
from tuneship.client import AsyncClient
from tuneship.contract.datasets import DatasetMerge, DatasetUpload
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.endpoints import (
    CanaryEndpointCreate,
    CanaryEndpointUpdate,
    EndpointCreate,
    Member,
)
from tuneship.contract.jobs import JobCreate
from tuneship.contract.webhooks import SecretRotation, WebhookCreate
from tuneship.settings import ClientSettings
from tuneship.store.database import rows, tables

pytestmark = pytest.mark.both_databases(postgres="soak")


class LossyNetwork(httpx.AsyncBaseTransport):
    """A transport that delivers every request and loses the first answer of each pair."""

    def __init__(self, service: Service) -> None:
        self._inner = service.transport()
        self._is_next_lost = True
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self._inner.handle_async_request(request)
        self.requests.append(request)
        self._is_next_lost = not self._is_next_lost
        if not self._is_next_lost:
            await answer.aread()
            raise httpx.ReadTimeout("lost")
        return answer


def lossy(service: Service) -> tuple[AsyncClient, LossyNetwork]:
    network = LossyNetwork(service)
    key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
    settings = ClientSettings(url=service.url, api_key=SecretStr(key), client_id="alice")
    return AsyncClient(settings, transport=network), network


def call(service: Service, use: Callable[[AsyncClient], Any]) -> tuple[Any, list[httpx.Request]]:
    """Return the result of a call and its requests; the service obeyed the first one, and its answer got lost."""
    client, network = lossy(service)

    async def used() -> Any:
        async with client:
            return await use(client)

    return service.run(used()), network.requests


def listed(service: Service, path: str) -> list[str]:
    answer = service.call("GET", path).json()
    return [one["id"] for one in next(iter(answer.values()))]


def test_creates_over_a_lossy_network_are_there_once(service: Service) -> None:
    def upload(client: AsyncClient) -> Any:
        form = DatasetUpload(name="d", format="instruction")
        return client.datasets.upload(form, io.BytesIO(jsonl(*LINES)))

    one, requests = call(service, upload)
    assert len(requests) == 2
    other, _ = call(service, upload)
    assert sorted(listed(service, "/v1/datasets")) == sorted([one.id, other.id])
    merge = DatasetMerge(dataset_ids=[one.id, other.id], name="both")
    merged, _ = call(service, lambda client: client.datasets.merge(merge))
    assert listed(service, "/v1/datasets")[0] == merged.id
    assert len(listed(service, "/v1/datasets")) == 3
    tuning = JobCreate(base_model="tuneship-tiny", dataset_id=merged.id, model_name="m")
    job, _ = call(service, lambda client: client.jobs.create(tuning))
    assert listed(service, "/v1/fine-tuning/jobs") == [job.id]
    wanted = DeploymentCreate(model_name="tuneship-tiny", deployment_name="d")
    deployment, _ = call(service, lambda client: client.deployments.create(wanted))
    assert listed(service, "/v1/deployments") == [deployment.id]
    service.until(lambda: service.deployment_status(deployment.id) == "running")
    plain = EndpointCreate(name="plain", deployment_id=deployment.id)
    endpoint, _ = call(service, lambda client: client.endpoints.create(plain))
    assert listed(service, "/v1/endpoints") == [endpoint.id]
    receiver = WebhookCreate(url="https://receiver.test/x", events=["*"])
    webhook, _ = call(service, lambda client: client.webhooks.create(receiver))
    assert listed(service, "/v1/webhooks") == [webhook.id]


def test_a_secret_that_was_rotated_over_a_lossy_network_is_the_one_in_force(
    service: Service,
) -> None:
    receiver = WebhookCreate(url="https://receiver.test/x", events=["*"])
    made, _ = call(service, lambda client: client.webhooks.create(receiver))
    rotation = SecretRotation(overlap_hours=1)
    rotated, requests = call(
        service, lambda client: client.webhooks.rotate_secret(made.id, rotation)
    )
    assert len(requests) == 2
    with service.database.read() as connection:
        row = rows.fetch(connection, tables.webhooks, made.id, client_id="alice")
    assert row is not None
    kept = [row["secret"], row["previous_secret"]]
    opened = [service.parts.vault.open(one, made.id).decode() for one in kept]
    assert opened == [rotated.secret, made.secret]


def test_a_split_that_was_changed_with_if_match_over_a_lossy_network_is_reported_as_changed(
    service: Service,
) -> None:
    deployment = service.deployment("d")
    members = [Member(id=deployment, traffic_percentage=100)]
    wanted = CanaryEndpointCreate(name="e", deployments=members)
    endpoint, _ = call(service, lambda client: client.canary_endpoints.create(wanted))
    changed, requests = call(
        service,
        lambda client: client.with_options(if_match='"1"').canary_endpoints.update(
            endpoint.id, CanaryEndpointUpdate(deployments=members)
        ),
    )
    assert (changed.version, len(requests)) == (2, 2)


def test_deletes_over_a_lossy_network_are_reported_as_deleted(service: Service) -> None:
    dataset = service.dataset()
    gone, requests = call(service, lambda client: client.datasets.delete(dataset))
    assert (gone.id, gone.deleted, len(requests)) == (dataset, True, 2)
    deployment = service.deployment("d")
    endpoint = service.endpoint("e", deployment)
    gone, _ = call(service, lambda client: client.endpoints.delete(endpoint))
    assert (gone.id, gone.status) == (endpoint, "deleted")
    gone, _ = call(service, lambda client: client.deployments.delete(deployment))
    assert gone.id == deployment
    assert gone.status in ("deleting", "deleted")
