"""Models: the list of base models and fine-tuned ones."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import RETRIES, api
from tuneship.contract.models import Model


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="list-models")
def list_models(fine_tuned_only: bool = False) -> list[Model]:
    """Every model of this client, all pages."""
    models: list[Model] = []
    offset: int | None = 0
    while offset is not None:
        page = api().models.list(limit=100, offset=offset, fine_tuned_only=fine_tuned_only)
        models += page.models
        offset = page.pagination.next_offset if page.pagination else None
    return models
