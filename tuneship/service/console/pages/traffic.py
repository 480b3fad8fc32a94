"""Who gets the traffic of an endpoint: a new one, a cut-over of one deployment, and a split among several."""

from collections.abc import Sequence

from tuneship.contract.common import AnyEndpointId, DeploymentId
from tuneship.contract.deployments import SERVING, list_deployments
from tuneship.contract.endpoints import CanaryEndpoint, MemberShare
from tuneship.service.console.forms import Choices, FormField, FormView
from tuneship.service.console.page import page
from tuneship.service.console.page_client import MOST_LISTED, PageClient
from tuneship.service.console.rendering import place

MOST_MEMBERS = 10
EMPTY_ROWS = 2
ENDPOINTS = ("Endpoints", "/console/endpoints")
NAME = FormField("name", "name")
NOBODY = "No deployment is running."
DEPLOY = ("Deploy a model.", "/console/deployments/new")


@page("/console/endpoints/new", is_live=False, template="form.html")
async def new_endpoint(client: PageClient, deployment_id: DeploymentId | None = None) -> FormView:
    """An address that leads to one deployment."""
    serving = await _serving(client)
    to = FormField("deployment_id", "deployment_id", deployment_id, choices=serving)
    return FormView(
        title="New endpoint",
        says="An address for callers that routes to one deployment, and can be switched to another one later.",
        places=(ENDPOINTS, ("New endpoint", "")),
        action="create_endpoint",
        refused="No endpoint was made",
        then="/console/endpoints",
        sections=(("Traffic", [NAME, to]),),
        blocked="" if serving else NOBODY,
        other=("Split the traffic over several instead.", "/console/endpoints/new-split")
        if serving
        else DEPLOY,
    )


@page("/console/endpoints/new-split", is_live=False, template="form.html")
async def new_split(client: PageClient) -> FormView:
    """An address whose traffic is split."""
    serving = await _serving(client)
    return FormView(
        title="New endpoint with a split",
        says="An address whose traffic is split: a rollout shifts it step by step. The shares must add up to 100.",
        places=(ENDPOINTS, ("New endpoint with a split", "")),
        action="create_canary_endpoint",
        refused="No endpoint was made",
        then="/console/endpoints",
        sections=(("Endpoint", [NAME]), ("Traffic", _shares([], serving))),
        blocked="" if serving else NOBODY,
        other=("Route to one deployment instead.", "/console/endpoints/new") if serving else DEPLOY,
    )


@page("/console/endpoints/{endpoint_id}/traffic", is_live=False, template="form.html")
async def traffic(client: PageClient, endpoint_id: AnyEndpointId) -> FormView:
    """A change by hand, for the version of the endpoint that the person has seen."""
    found = await client.endpoints.get(endpoint_id)
    serving = await _serving(client)
    address = place(f"/endpoints/{found.id}")
    blocked = ""
    if isinstance(found, CanaryEndpoint):
        title, action, refused = (
            "Change the split",
            "update_canary_endpoint",
            "The split is unchanged",
        )
        says = "The new split takes effect with the next request. The shares must add up to 100."
        fields = _shares(found.deployments, serving)
        if found.lease is not None:
            blocked = "A rollout is in progress and sets the split itself. Roll it back first, or let it end."
    else:
        title, action, refused = "Cut over", "update_endpoint", "The traffic is unchanged"
        says = "From the next request on, all traffic goes to the deployment that you choose."
        fields = [FormField("deployment_id", "deployment_id", found.deployment_id, choices=serving)]
    return FormView(
        title=f"{title}: {found.name}",
        says=says,
        places=(ENDPOINTS, (found.name, address), (title, "")),
        action=action,
        refused=refused,
        then=address,
        sections=(("Traffic", fields),),
        hidden={"endpoint_id": found.id, "if_match": f'"{found.version}"'},
        blocked=blocked,
    )


def _shares(members: Sequence[MemberShare], serving: Choices) -> list[FormField]:
    """A deployment and its share, for each member and some more."""
    rows: list[tuple[str, int | None]] = [(one.id, one.traffic_percentage) for one in members]
    rows += [("", None)] * EMPTY_ROWS
    fields: list[FormField] = []
    for number, (identifier, share) in enumerate(rows[:MOST_MEMBERS]):
        name = f"deployments[{number}]"
        choices = (("", "none"), *serving)
        fields += [
            FormField(f"{name}.id", f"deployment {number + 1}", identifier, choices=choices),
            FormField(f"{name}.traffic_percentage", "share", share, "percent"),
        ]
    return fields


async def _serving(client: PageClient) -> Choices:
    if not client.may(list_deployments):
        return ()
    found = (await client.deployments.list(limit=MOST_LISTED)).deployments
    return [
        (one.id, f"{one.deployment_name}, {one.model_name}")
        for one in found
        if one.status in SERVING
    ]
