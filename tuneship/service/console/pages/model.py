"""One model: what it was made from, what its card can say, how it was evaluated, and what serves it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeVar

from tuneship.cards.facts import dataset_facts, model_facts, privacy_facts, training_facts
from tuneship.cards.making import new_card
from tuneship.contract.common import ModelId
from tuneship.contract.datasets import get_dataset
from tuneship.contract.deployments import DeploymentListItem, list_deployments
from tuneship.contract.errors import ModelNotFound, ResourceNotFound
from tuneship.contract.evaluations import EvaluationSummary, list_evaluations
from tuneship.contract.jobs import Job, get_job
from tuneship.contract.model_card import ModelCard
from tuneship.contract.models import Model
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

# Evaluations are listed without a filter for models.
EVALUATIONS_READ = 100
Found = TypeVar("Found")


@dataclass(frozen=True)
class ModelView:
    """A model with its lineage, as far as this session may see it."""

    model: Model
    job: Job | None
    deployments: list[DeploymentListItem]
    # As far as the service knows it: people's statements and the release's findings are in the card of its release.
    card: ModelCard | None
    # Those of the newest in which it was candidate or baseline; None where the session may not read them.
    evaluations: list[EvaluationSummary] | None


@page("/console/models/{model_id:path}")
async def model(client: PageClient, model_id: ModelId) -> ModelView:
    """The job that made it, and the deployments that serve it."""
    found = await client.models.get(model_id)
    job = None
    if client.may(get_job):
        job = await _unless_gone(client.jobs.get, found.fine_tuning_job_id)
    serving: list[DeploymentListItem] = []
    if client.may(list_deployments):
        serving = (await client.deployments.list(limit=50, model_name=model_id)).deployments
    evaluations = None
    if client.may(list_evaluations):
        newest = (await client.evaluations.list(limit=EVALUATIONS_READ)).evaluations
        evaluations = [
            one for one in newest if found.id in (one.candidate_model, one.baseline_model)
        ]
    return ModelView(found, job, serving, await _card(client, found, job), evaluations)


async def _card(client: PageClient, tuned: Model, job: Job | None) -> ModelCard | None:
    if tuned.base_model is None:
        return None
    base = await _unless_gone(client.models.get, tuned.base_model)
    used: dict[Literal["training", "validation"], str | None] = {}
    if job is not None:
        used = {"training": job.dataset_id, "validation": job.validation_dataset_id}
    may_read = client.may(get_dataset)
    data = [
        dataset_facts(role, one, await _unless_gone(client.datasets.get, one if may_read else None))
        for role, one in used.items()
        if one is not None
    ]
    return new_card(
        datetime.now(UTC),
        model_facts(tuned.name, tuned.base_model, tuned.id, tuned, base),
        data=data,
        training=None if job is None else training_facts(job),
        privacy=privacy_facts(job),
    )


async def _unless_gone(
    get: Callable[[str], Awaitable[Found]], identifier: str | None
) -> Found | None:
    try:
        return None if identifier is None else await get(identifier)
    except (ModelNotFound, ResourceNotFound):
        return None
