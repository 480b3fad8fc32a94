"""One model: what it was made from, what it can take, and what serves it."""

from dataclasses import dataclass

from tuneship.contract.common import ModelId
from tuneship.contract.deployments import DeploymentListItem, list_deployments
from tuneship.contract.jobs import Job, get_job
from tuneship.contract.models import Model
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient


@dataclass(frozen=True)
class ModelView:
    """A model with its lineage, as far as this session may see it."""

    model: Model
    job: Job | None
    deployments: list[DeploymentListItem]


@page("/console/models/{model_id:path}")
async def model(client: PageClient, model_id: ModelId) -> ModelView:
    """The job that made it, and the deployments that serve it."""
    found = await client.models.get(model_id)
    job = None
    if found.fine_tuning_job_id is not None and client.may(get_job):
        job = await client.jobs.get(found.fine_tuning_job_id)
    serving: list[DeploymentListItem] = []
    if client.may(list_deployments):
        serving = (await client.deployments.list(limit=50, model_name=model_id)).deployments
    return ModelView(found, job, serving)
