"""Deployments: create, get, update, delete, and the wait until one serves."""

import time

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.api import RETRIES, api
from tasks.creates import CREATES, once
from tuneship.contract.deployments import (
    Deployment,
    DeploymentCreate,
    DeploymentCreated,
    DeploymentDeleted,
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
    """Ask for a deployment, once for this run."""
    content = deployment.model_dump(mode="json", by_alias=True)
    return once(run_key, "create_deployment", content).deployments.create(deployment)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="get-{deployment_id}")
def get_deployment(deployment_id: str) -> Deployment:
    """Fetch a deployment."""
    return api().deployments.get(deployment_id)


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
        deployment = api().deployments.get(deployment_id)
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
