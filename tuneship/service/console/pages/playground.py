"""The playground: one prompt, and the answers of one or two deployments side by side.

Prompts and answers never pass this module: the page's script sends them to the operation `generate`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuneship.contract.common import DeploymentId
from tuneship.contract.deployments import DeploymentListItem, DeploymentStatus
from tuneship.contract.endpoints import list_canary_endpoints
from tuneship.contract.generation import Generate
from tuneship.service.console.page import page
from tuneship.service.console.page_client import MOST_LISTED, PageClient

NUMBERS = ("temperature", "top_p", "max_tokens", "seed")


@dataclass(frozen=True)
class PlaygroundView:
    """The deployments that can be asked, those that were chosen, and the limits of a request."""

    deployments: list[DeploymentListItem]
    a: str | None
    b: str | None
    # What a deployment serves of a canary endpoint, by its id.
    shares: Mapping[str, str]
    # Least and largest values by field, as the contract declares them.
    limits: Mapping[str, Mapping[str, Any]]
    # The longest answer that both deployments allow.
    longest: int | None


@page("/console/playground", at=("Ship", 4), name="Playground")
async def playground(
    client: PageClient, a: DeploymentId | None = None, b: DeploymentId | None = None
) -> PlaygroundView:
    """The newest running deployments, and those of the address in any state."""
    found = await client.deployments.list(limit=MOST_LISTED, status=DeploymentStatus.RUNNING)
    chosen = [await client.deployments.get(one) for one in (a, b) if one is not None]
    listed = {one.id: one for one in (*found.deployments, *chosen)}
    return PlaygroundView(
        deployments=[*listed.values()],
        a=a or next(iter(listed), None),
        b=b,
        shares=await _shares(client) if client.may(list_canary_endpoints) else {},
        limits=_limits(),
        longest=min((one.generation["max_output_tokens"] for one in chosen), default=None),
    )


async def _shares(client: PageClient) -> Mapping[str, str]:
    found = await client.canary_endpoints.list(limit=MOST_LISTED)
    return {
        member.id: f"{member.traffic_percentage} % of {one.name}"
        for one in reversed(found.canary_endpoints)
        for member in one.deployments
    }


def _limits() -> Mapping[str, Mapping[str, Any]]:
    fields = Generate.model_json_schema()["properties"]
    return {name: fields[name]["anyOf"][0] for name in NUMBERS} | {"stop": fields["stop"]}
