"""Canary endpoints: find, create, read, change the split, renew the lease. One task is one API operation.

A change of the split is sent once, with `If-Match` and without an idempotency key. After a lost answer, the caller
reads the split back (`flows/rollout/split.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.create_once import CREATES, once
from tuneship.contract.endpoints import (
    CanaryEndpoint,
    CanaryEndpointCreate,
    CanaryEndpointPage,
    CanaryEndpointUpdate,
    Endpoint,
    EndpointCreate,
    LargeKeyHandling,
    LeaseRenewal,
    LeaseRequest,
    Member,
)
from tuneship.prefect.calls import RETRIES
from tuneship.prefect.connection import api

# A rollout must roll back within a minute of the decision, so it never waits long for one answer.
CONTROL_TIMEOUT_S = 10.0
# For an answer that comes byte by byte, and for retries of a read.
CONTROL_DEADLINE_S = 30.0
# Statuses of a server that does not offer an operation. 404 may also mean that there is no such
# resource.
NO_SUCH_ROUTE = (404, 405, 501)


@dataclass(frozen=True)
class KeyDraw:
    """How routing keys get deployments: hashed with the rollout's id; `large_keys` decides about busy ones."""

    rollout_id: str
    large_keys: LargeKeyHandling


def members(split: Mapping[str, int]) -> list[Member]:
    """A split in its wire form."""
    return [Member(id=name, traffic_percentage=share) for name, share in split.items()]


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="create-canary-endpoint-{name}")
def create_canary_endpoint(name: str, split: Mapping[str, int], run_key: str) -> CanaryEndpoint:
    """Make the endpoint once per `run_key`, however often this is repeated."""
    wanted = CanaryEndpointCreate(name=name, deployments=members(split))
    client = once(run_key, "create_canary_endpoint", [name, dict(split)])
    return client.canary_endpoints.create(wanted)


@task(**CREATES, task_run_name="create-endpoint-{endpoint.name}")
def create_endpoint(endpoint: EndpointCreate, run_key: str) -> Endpoint:
    """Make an endpoint that does not split its traffic, once for this run."""
    content = endpoint.model_dump(mode="json")
    return once(run_key, "create_endpoint", content).endpoints.create(endpoint)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="get-canary-endpoint-{endpoint_id}")
def get_canary_endpoint(endpoint_id: str) -> CanaryEndpoint:
    """Read the split, its version and its lease."""
    client = api(CONTROL_DEADLINE_S).with_options(timeout_s=CONTROL_TIMEOUT_S)
    return client.canary_endpoints.get(endpoint_id)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="list-canary-endpoints-{name}")
def list_canary_endpoints(name: str) -> CanaryEndpointPage:
    """List the endpoints with exactly this name: one or none."""
    client = api().with_options(timeout_s=CONTROL_TIMEOUT_S)
    return client.canary_endpoints.list(name=name)


def every_canary_endpoint() -> list[CanaryEndpoint]:
    """All endpoints of this key's tenant, page by page: as many calls as there are pages, so it is no task."""
    return list(api().with_options(timeout_s=CONTROL_TIMEOUT_S).canary_endpoints.iterate())


@task(cache_policy=NO_CACHE, task_run_name="shift-{percentage}%")
def update_canary_endpoint(
    endpoint_id: str,
    split: Mapping[str, int],
    percentage: int,  # noqa: ARG001 - names the task run
    version: int | None = None,
    lease: LeaseRequest | None = None,
    keys: KeyDraw | None = None,
) -> CanaryEndpoint:
    """Replace the whole split, once. `percentage` is the candidate's share and names the task run."""
    # A server without leases, or without salts, refuses their fields, even as null.
    more: dict[str, Any] = {} if lease is None else {"lease": lease}
    if keys is not None:
        more |= {"rollout_id": keys.rollout_id, "large_keys": keys.large_keys}
    update = CanaryEndpointUpdate(deployments=members(split), **more)
    client = api(CONTROL_DEADLINE_S).with_options(
        if_match=None if version is None else f'"{version}"', tries=1, timeout_s=CONTROL_TIMEOUT_S
    )
    return client.canary_endpoints.update(endpoint_id, update)


@task(cache_policy=NO_CACHE, task_run_name="renew-lease-{endpoint_id}")
def renew_canary_lease(endpoint_id: str, seconds: int) -> CanaryEndpoint:
    """Keep the split for this many more seconds; 0 ends the lease. Sent once: the next look is the retry."""
    client = api(CONTROL_DEADLINE_S).with_options(tries=1, timeout_s=CONTROL_TIMEOUT_S)
    return client.canary_endpoints.renew_lease(endpoint_id, LeaseRenewal(seconds=seconds))
