"""The list of jobs."""

from dataclasses import dataclass

from tuneship.contract.common import ModelId, Offset, Pagination
from tuneship.contract.jobs import JobStatus, JobSummary
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

ROWS = 50


@dataclass(frozen=True)
class JobsView:
    """One page of the list, and how it is filtered."""

    jobs: list[JobSummary]
    pages: Pagination
    status: JobStatus | None
    base_model: str | None
    statuses: tuple[str, ...] = tuple(JobStatus)


@page("/console/jobs", at=("Train", 1), name="Jobs")
async def jobs(
    client: PageClient,
    offset: Offset = 0,
    status: JobStatus | None = None,
    base_model: ModelId | None = None,
) -> JobsView:
    """Newest first."""
    found = await client.jobs.list(limit=ROWS, offset=offset, status=status, base_model=base_model)
    return JobsView(found.jobs, found.pagination, status, base_model)
