"""Deployments: create them once for a release, get and delete them."""

from prefect import task

from tasks.create_once import CREATES, as_created, made_before, marks, once
from tuneship.contract import deployments
from tuneship.contract.deployments import (
    GONE,
    DeploymentCreate,
    DeploymentCreated,
)
from tuneship.prefect.connection import api
from tuneship.prefect.tasks import task_of


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
