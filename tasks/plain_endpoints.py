"""Plain endpoints: one address in front of one deployment. Those that split traffic: `tasks/endpoints.py`."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import RETRIES, api
from tasks.create_once import CREATES, once
from tuneship.contract.endpoints import (
    CanaryEndpoint,
    Endpoint,
    EndpointCreate,
    EndpointDeleted,
    EndpointUpdate,
)


@task(**CREATES, task_run_name="create-endpoint-{endpoint.name}")
def create_endpoint(endpoint: EndpointCreate, run_key: str) -> Endpoint:
    """Make an endpoint, once for this run."""
    content = endpoint.model_dump(mode="json")
    return once(run_key, "create_endpoint", content).endpoints.create(endpoint)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="get-endpoint-{endpoint_id}")
def get_endpoint(endpoint_id: str) -> Endpoint | CanaryEndpoint:
    """Fetch an endpoint of either kind."""
    return api().endpoints.get(endpoint_id)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="list-endpoints")
def list_endpoints(name: str | None = None) -> list[Endpoint]:
    """Every plain endpoint of this client, all pages, newest first; or those of one name."""
    return list(api().endpoints.iterate(limit=100, name=name))


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="update-endpoint-{endpoint_id}")
def update_endpoint(endpoint_id: str, update: EndpointUpdate) -> Endpoint:
    """Point an endpoint at another deployment."""
    return api().endpoints.update(endpoint_id, update)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="delete-endpoint-{endpoint_id}")
def delete_endpoint(endpoint_id: str) -> EndpointDeleted:
    """Remove an endpoint; its deployment stays."""
    return api().endpoints.delete(endpoint_id)
