"""Models: the base models and the tuned ones, what may be trained on them, and the delete."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import RETRIES, api
from tuneship.contract.common import Deleted, Tags
from tuneship.contract.models import Model, ModelLimits


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="list-models")
def list_models(
    fine_tuned_only: bool = False, base_model: str | None = None, tags: Tags | None = None
) -> list[Model]:
    """Every model of this client, all pages."""
    models = api().models.iterate(
        limit=100, fine_tuned_only=fine_tuned_only, base_model=base_model, tags=tags
    )
    return list(models)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="get-{model_id}")
def get_model(model_id: str) -> Model:
    """Fetch one model."""
    return api().models.get(model_id)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="limits-{model_id}")
def get_model_limits(model_id: str) -> ModelLimits:
    """Fetch what a training of this model may ask for."""
    return api().models.limits(model_id)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="delete-{model_id}")
def delete_model(model_id: str) -> Deleted:
    """Delete a tuned model for ever. The service refuses while a deployment serves it."""
    return api().models.delete(model_id)
