"""Instance types: what a job or a deployment can run on here."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import RETRIES, api
from tuneship.contract.instances import InstanceTypes


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="list-instance-types")
def list_instance_types() -> InstanceTypes:
    """The instance types of the service."""
    return api().instance_types.list()
