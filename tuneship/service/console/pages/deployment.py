"""One deployment: what it serves, how it is, and its log."""

from dataclasses import dataclass

from tuneship.contract.common import DeploymentId
from tuneship.contract.deployments import Deployment, get_deployment_logs
from tuneship.contract.metrics import DeploymentMetrics, get_deployment_metrics
from tuneship.contract.reports.deployment_logs import DeploymentLogEntry
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

LOG_LINES = 200


@dataclass(frozen=True)
class DeploymentView:
    """A deployment; metrics of the last hour and its log, where this session may read them."""

    deployment: Deployment
    metrics: DeploymentMetrics | None
    # Oldest first; None where the session may not read it.
    log: list[DeploymentLogEntry] | None


@page("/console/deployments/{deployment_id}")
async def deployment(client: PageClient, deployment_id: DeploymentId) -> DeploymentView:
    """What the session may not read is left out."""
    found = await client.deployments.get(deployment_id)
    metrics = log = None
    if client.may(get_deployment_metrics):
        metrics = await client.deployments.metrics(deployment_id, interval="1h")
    if client.may(get_deployment_logs):
        log = (await client.deployments.logs(deployment_id, limit=LOG_LINES)).logs[::-1]
    return DeploymentView(found, metrics, log)
