"""One endpoint: who gets its traffic, what callers see of each, and when the traffic returns by itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tuneship.contract.common import AnyEndpointId
from tuneship.contract.deployments import Deployment, get_deployment
from tuneship.contract.endpoints import CanaryDecided, CanaryEndpoint, Endpoint
from tuneship.contract.metrics import DeploymentMetrics, get_deployment_metrics
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient


@dataclass(frozen=True)
class MemberView:
    """A deployment behind the endpoint; `deployment` and `metrics` where this session may read them."""

    id: str
    share: int
    # Where the traffic returns to, in a rollout; it is the baseline.
    is_baseline: bool
    deployment: Deployment | None
    metrics: DeploymentMetrics | None

    @property
    def name(self) -> str:
        """Its name, or its id where the name may not be read."""
        return self.id if self.deployment is None else self.deployment.deployment_name


@dataclass(frozen=True)
class EndpointView:
    """An endpoint with its members, those with the most traffic first, and charts of the last hour."""

    endpoint: Endpoint | CanaryEndpoint
    members: list[MemberView]
    charts: Mapping[str, Any] | None

    @property
    def lease(self) -> Any:
        """The lease of a rollout; None where nothing returns by itself."""
        return getattr(self.endpoint, "lease", None)

    @property
    def is_canary(self) -> bool:
        """Whether it splits its traffic, so that rollouts happen here."""
        return isinstance(self.endpoint, CanaryEndpoint)

    @property
    def paused(self) -> CanaryDecided | None:
        """Who holds the split."""
        return self.endpoint.paused if isinstance(self.endpoint, CanaryEndpoint) else None

    @property
    def reverted(self) -> CanaryDecided | None:
        """Who rolled the last rollout back."""
        return self.endpoint.reverted if isinstance(self.endpoint, CanaryEndpoint) else None

    def returns_in(self, now: datetime) -> timedelta:
        """How long until all traffic returns, unless the rollout goes on."""
        return max(self.lease.expires_at - now, timedelta())

    def leased(self, now: datetime) -> float:
        """The share of the lease that is left."""
        return min(1.0, self.returns_in(now) / timedelta(seconds=self.lease.seconds))


@page("/console/endpoints/{endpoint_id}")
async def endpoint(client: PageClient, endpoint_id: AnyEndpointId) -> EndpointView:
    """Metrics are those of the requests through this endpoint."""
    found = await client.endpoints.get(endpoint_id)
    fallback: set[str] = set()
    if isinstance(found, CanaryEndpoint):
        shares = {one.id: one.traffic_percentage for one in found.deployments}
        if found.lease is not None:
            fallback = {one.id for one in found.lease.fallback if one.traffic_percentage}
    else:
        shares = {found.deployment_id: 100}
    members = [
        MemberView(
            one,
            share,
            one in fallback,
            await client.deployments.get(one) if client.may(get_deployment) else None,
            await client.deployments.metrics(
                one, metrics=["latency", "error_rate"], endpoint_id=endpoint_id
            )
            if client.may(get_deployment_metrics)
            else None,
        )
        for one, share in sorted(shares.items(), key=lambda item: -item[1])
    ]
    return EndpointView(found, members, _charts(members))


def _charts(members: list[MemberView]) -> dict[str, Any] | None:
    """Failed requests in percent, and the latency that 95 % stay below, by minute and member."""
    measured = [one for one in members if one.metrics is not None]
    if not measured:
        return None
    names = [one.name for one in measured]
    arms = ["baseline" if one.is_baseline else "candidate" for one in measured]
    failed: list[Mapping[int, float | None]] = []
    slow: list[Mapping[int, float | None]] = []
    for one in measured:
        series = one.metrics.metrics if one.metrics else None
        failed.append(_by_time(series and series.error_rate, "percentage"))
        slow.append(_by_time(series and series.latency, "p95"))
    return {
        "failed": {
            "kind": "arms",
            "unit": " %",
            "names": names,
            "arms": arms,
            "columns": _columns(failed),
        },
        "slow": {
            "kind": "arms",
            "unit": " ms",
            "names": names,
            "arms": arms,
            "columns": _columns(slow),
        },
    }


def _by_time(series: Any, name: str) -> dict[int, float | None]:
    if series is None or getattr(series, name) is None:
        return {}
    moments = [int(moment.astimezone(UTC).timestamp()) for moment in series.timestamps]
    return dict(zip(moments, getattr(series, name), strict=True))


def _columns(series: list[Mapping[int, float | None]]) -> list[list[Any]]:
    moments = sorted({moment for one in series for moment in one})
    return [moments, *([one.get(moment) for moment in moments] for one in series)]
