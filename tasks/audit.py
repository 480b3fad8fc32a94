"""What was done in this tenant's name, read from the service's audit chain."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import RETRIES, api
from tuneship.contract.audit import AuditPage


@task(**RETRIES, cache_policy=NO_CACHE, task_run_name="list-audit")
def list_audit(after: str | None = None) -> AuditPage:
    """The next page of entries, oldest first; its cursor is `after` of the next call."""
    return api().audit.list(limit=1000, after=after)
