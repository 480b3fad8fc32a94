"""Deployments: create, get, update, delete, and the wait until one serves."""

import time

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.api import POLL_TRIES, RETRIES, api
from tasks.create_once import CREATES, as_created, made_before, marks, once
from tuneship.contract.common import Tags
from tuneship.contract.deployments import (
    GONE,
    Deployment,
    DeploymentCreate,
    DeploymentCreated,
    DeploymentDeleted,
    DeploymentListItem,
    DeploymentLogs,
    DeploymentStatus,
    DeploymentUpdate,
    DeploymentUpdated,
)

POLL_SECONDS = 0.5
LONGEST_POLL_SECONDS = 5.0
NEVER_RUNNING = frozenset(
    {DeploymentStatus.FAILED, DeploymentStatus.DELETING, DeploymentStatus.DELETED}
)


class DeploymentNotRunning(Exception):
    """A deployment failed, was deleted, or did not serve before the deadline."""


@task(**CREATES, task_run_name="deploy-{deployment.deployment_name}")
def create_deployment(deployment: DeploymentCreate, run_key: str) -> DeploymentCreated:
    """Ask for a deployment, once for this run; one that it asked for before is found by its tags."""
    wanted = deployment.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    create = (run_key, "create_deployment", wanted)
    tags = marks(*create)
    for made in made_before(api().deployments.iterate(limit=100, tags=tags), tags):
        if made.status not in GONE:
            return as_created(DeploymentCreated, api().deployments.get(made.id))
    tagged = deployment.model_copy(update={"tags": {**deployment.tags, **tags}})
    return once(*create).deployments.create(tagged)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="get-{deployment_id}")
def get_deployment(deployment_id: str) -> Deployment:
    """Fetch a deployment."""
    return api().deployments.get(deployment_id)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="list-deployments")
def list_deployments(
    status: DeploymentStatus | None = None,
    model_name: str | None = None,
    tags: Tags | None = None,
) -> list[DeploymentListItem]:
    """Every deployment of this client, all pages, newest first."""
    found = api().deployments.iterate(limit=100, status=status, model_name=model_name, tags=tags)
    return list(found)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="logs-{deployment_id}")
def get_deployment_logs(deployment_id: str, after: str | None = None) -> DeploymentLogs:
    """The next page of a deployment's log, oldest first; it never holds a prompt or a completion."""
    return api().deployments.logs(deployment_id, limit=1000, order="asc", after=after)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="update-{deployment_id}")
def update_deployment(deployment_id: str, update: DeploymentUpdate) -> DeploymentUpdated:
    """Change replicas, tags or generation defaults."""
    return api().deployments.update(deployment_id, update)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="delete-{deployment_id}")
def delete_deployment(deployment_id: str) -> DeploymentDeleted:
    """Drain and remove a deployment. Never forced: the service refuses while an endpoint sends it traffic."""
    return api().deployments.delete(deployment_id)


@task(cache_policy=NO_CACHE, task_run_name="wait-for-{deployment_id}")
def wait_for_deployment(deployment_id: str, deadline_seconds: float = 600.0) -> Deployment:
    """Wait until a deployment runs. Raises `DeploymentNotRunning` with the service's reason."""
    deadline = time.monotonic() + deadline_seconds
    polls = 0
    while True:
        deployment = api().with_options(tries=POLL_TRIES).deployments.get(deployment_id)
        if deployment.status == DeploymentStatus.RUNNING:
            get_run_logger().info("deployment %s is running", deployment_id)
            return deployment
        if deployment.status in NEVER_RUNNING:
            why = deployment.error.message if deployment.error else "no reason given"
            raise DeploymentNotRunning(f"deployment {deployment_id} is {deployment.status}: {why}")
        if time.monotonic() > deadline:
            raise DeploymentNotRunning(f"deployment {deployment_id} is still {deployment.status}")
        polls += 1
        time.sleep(min(LONGEST_POLL_SECONDS, POLL_SECONDS * (1 + polls // 20)))
