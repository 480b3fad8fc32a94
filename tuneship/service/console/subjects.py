"""Names the thing that a question would delete, and whatever refers to it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tuneship.contract.deployments import get_deployment, list_deployments
from tuneship.contract.endpoints import CanaryEndpoint, list_canary_endpoints, list_endpoints
from tuneship.contract.errors import ResourceNotFound
from tuneship.contract.jobs import ALIVE, get_job, list_jobs
from tuneship.service.console.page_client import MOST_LISTED, PageClient
from tuneship.service.console.words import short_id


@dataclass(frozen=True)
class Reference:
    """Something that refers to the subject: its kind, its name, and its page below `/console`."""

    kind: str
    name: str
    path: str


@dataclass(frozen=True)
class Subject:
    """The thing that a question is about. `hint` says what the references mean for the deletion."""

    kind: str
    name: str
    identifier: str
    references: Sequence[Reference] = field(default_factory=list[Reference])
    hint: str = ""
    # Whether the service refuses as long as the references are there, and whether that can be overruled.
    is_kept: bool = False
    can_be_forced: bool = False


async def dataset(client: PageClient, fields: Mapping[str, str]) -> Subject:
    """A dataset, with the jobs that still use it."""
    found = await client.datasets.get(fields["dataset_id"])
    using: list[Reference] = []
    if client.may(list_jobs) and client.may(get_job):
        for status in sorted(ALIVE):
            for listed in (await client.jobs.list(limit=MOST_LISTED, status=status)).jobs:
                job = await client.jobs.get(listed.id)
                if found.id in (job.dataset_id, job.validation_dataset_id):
                    using.append(Reference("Job", job.model_name, f"/jobs/{job.id}"))
    hint = "It cannot be deleted until these jobs have ended." if using else ""
    return Subject("Dataset", found.name, found.id, using, hint, is_kept=bool(using))


async def model(client: PageClient, fields: Mapping[str, str]) -> Subject:
    """A model, with the deployments that name it."""
    found = await client.models.get(fields["model_id"])
    serving: list[Reference] = []
    if client.may(list_deployments):
        page = await client.deployments.list(limit=MOST_LISTED, model_name=found.id)
        serving = [
            Reference("Deployment", one.deployment_name, f"/deployments/{one.id}")
            for one in page.deployments
        ]
    hint = (
        "It cannot be deleted while a deployment uses it: delete these deployments first."
        if serving
        else ""
    )
    return Subject("Model", found.name, found.id, serving, hint, is_kept=bool(serving))


async def deployment(client: PageClient, fields: Mapping[str, str]) -> Subject:
    """A deployment, with the endpoints that send it traffic."""
    found = await client.deployments.get(fields["deployment_id"])
    sending: list[Reference] = []
    if client.may(list_endpoints):
        plain = await client.endpoints.list(limit=MOST_LISTED)
        sending = [
            Reference("Endpoint", f"{one.name}, 100 %", f"/endpoints/{one.id}")
            for one in plain.endpoints
            if one.deployment_id == found.id
        ]
    if client.may(list_canary_endpoints):
        split = await client.canary_endpoints.list(limit=MOST_LISTED)
        sending += [
            Reference(
                "Endpoint", f"{one.name}, {member.traffic_percentage} %", f"/endpoints/{one.id}"
            )
            for one in split.canary_endpoints
            for member in one.deployments
            if member.id == found.id and member.traffic_percentage
        ]
    hint = "These endpoints still send it traffic." if sending else ""
    is_kept = bool(sending)
    return Subject(
        "Deployment",
        found.deployment_name,
        found.id,
        sending,
        hint,
        is_kept=is_kept,
        can_be_forced=is_kept,
    )


async def endpoint(client: PageClient, fields: Mapping[str, str]) -> Subject:
    """An endpoint, with the deployments behind it."""
    found = await client.endpoints.get(fields["endpoint_id"])
    if isinstance(found, CanaryEndpoint):
        shares = {one.id: one.traffic_percentage for one in found.deployments}
        hint = "Its rollout then has no endpoint, and fails." if found.lease else ""
    else:
        shares, hint = {found.deployment_id: 100}, ""
    behind = [
        Reference("Deployment", f"{await _name(client, one)}, {share} %", f"/deployments/{one}")
        for one, share in shares.items()
    ]
    return Subject("Endpoint", found.name, found.id, behind, hint or "Its deployments are kept.")


async def _name(client: PageClient, deployment_id: str) -> str:
    if not client.may(get_deployment):
        return short_id(deployment_id)
    try:
        return (await client.deployments.get(deployment_id)).deployment_name
    except ResourceNotFound:
        return short_id(deployment_id)


# By the name of the action.
SUBJECTS: Mapping[str, Callable[[PageClient, Mapping[str, str]], Awaitable[Subject]]] = {
    "delete_dataset": dataset,
    "delete_model": model,
    "delete_deployment": deployment,
    "delete_endpoint": endpoint,
    "delete_canary_endpoint": endpoint,
}
