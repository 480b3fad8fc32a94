"""Generation, by deployment and through an endpoint. Prompts and completions reach no log, no name and no artifact."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import RETRIES, api
from tuneship.contract.generation import Generate, Generation


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="generate-{deployment_id}")
def generate(deployment_id: str, request: Generate) -> Generation:
    """Generate with one deployment."""
    return api().deployments.generate(deployment_id, request)


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="generate-by-{endpoint_id}")
def generate_by_endpoint(endpoint_id: str, request: Generate) -> Generation:
    """Generate through an endpoint, which draws the deployment by its split."""
    return api().canary_endpoints.generate(endpoint_id, request)
