"""Deployments: create, get, update, delete, and the wait until one serves."""

import time

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.api import api
from tasks.create_once import CREATES, as_created, made_before, marks, once
from tasks.factory import task_of
from tuneship.contract import deployments
from tuneship.contract.deployments import (
    GONE,
    Deployment,
    DeploymentCreate,
    DeploymentCreated,
    DeploymentStatus,
)
from tuneship.prefect.calls import POLL_TRIES

POLL_SECONDS = 0.5
LONGEST_POLL_SECONDS = 5.0
NEVER_RUNNING = frozenset(
    {DeploymentStatus.FAILED, DeploymentStatus.DELETING, DeploymentStatus.DELETED}
)


class DeploymentNotRunning(Exception):
    """A deployment failed, was deleted, or did not serve before the deadline."""


@task(**CREATES, task_run_name="deploy-{deployment.deployment_name}")
def create_deployment(deployment: DeploymentCreate, run_key: str) -> DeploymentCreated:
    """Create a deployment, once for this run; one that it has created before is found by its tags."""
    wanted = deployment.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    create = (run_key, "create_deployment", wanted)
    tags = marks(*create)
    for existing in made_before(api().deployments.iterate(limit=100, tags=tags), tags):
        if existing.status not in GONE:
            return as_created(DeploymentCreated, api().deployments.get(existing.id))
    tagged = deployment.model_copy(update={"tags": {**deployment.tags, **tags}})
    return once(*create).deployments.create(tagged)


get_deployment = task_of(deployments.get_deployment)
delete_deployment = task_of(deployments.delete_deployment)


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
