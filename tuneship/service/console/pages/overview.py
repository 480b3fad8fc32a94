"""The first page: what serves now, what is in progress, and what has ended."""

from dataclasses import dataclass

from tuneship.contract.endpoints import CanaryEndpoint, Endpoint, list_canary_endpoints
from tuneship.contract.jobs import ENDED, JobStatus, JobSummary, list_jobs
from tuneship.contract.releases import Release, ReleaseStatus, list_releases
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

SHOWN = 10


@dataclass(frozen=True)
class OverviewView:
    """The newest of each kind; None where the session lacks the scope."""

    canaries: list[CanaryEndpoint] | None
    endpoints: list[Endpoint] | None
    working: list[JobSummary] | None
    queued: int
    recent: list[JobSummary] | None
    # Those that wait for a person, and those at work.
    asked: list[Release] | None
    releasing: list[Release] | None

    @property
    def shifting(self) -> list[CanaryEndpoint]:
        """The endpoints whose traffic returns by itself unless a rollout goes on."""
        return [one for one in self.canaries or () if one.lease is not None]


@page("/console", at=("", 1), name="Overview")
async def overview(client: PageClient) -> OverviewView:
    """The newest of each."""
    canaries = endpoints = working = recent = asked = releasing = None
    queued = 0
    if client.may(list_canary_endpoints):
        canaries = (await client.canary_endpoints.list(limit=SHOWN)).canary_endpoints
        endpoints = (await client.endpoints.list(limit=SHOWN)).endpoints
    if client.may(list_jobs):
        running = await client.jobs.list(limit=SHOWN, status=JobStatus.RUNNING)
        queued = (await client.jobs.list(limit=1, status=JobStatus.QUEUED)).pagination.total
        working = running.jobs
        newest = await client.jobs.list(limit=SHOWN)
        recent = [one for one in newest.jobs if one.status in ENDED]
    if client.may(list_releases):
        found = await client.releases.list(limit=SHOWN, status=ReleaseStatus.WAITING)
        asked = found.releases
        found = await client.releases.list(limit=SHOWN, status=ReleaseStatus.RUNNING)
        releasing = found.releases
    return OverviewView(canaries, endpoints, working, queued, recent, asked, releasing)
