"""`tuneship canary status`: the split of canary endpoints, with the health and the last hour of each deployment."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tuneship.cli.completion import completing
from tuneship.cli.connection import connected, reported
from tuneship.cli.output import Row, is_terminal, one_line, show_json, show_rows, write
from tuneship.cli.parameters import AsJson
from tuneship.contract.common import CanaryEndpointId, render_time

if TYPE_CHECKING:  # starts slowly
    from tuneship.client import Client
    from tuneship.contract.endpoints import CanaryEndpoint

COLUMNS = ("share", "deployment", "name", "status", "health", "requests", "errors", "p95_ms")

app = typer.Typer(no_args_is_help=True)


@app.callback()
def canary() -> None:
    """Hold the verbs of canary endpoints that are not made from a declared operation."""


@app.command()
def status(
    endpoint_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ENDPOINT_ID",
            autocompletion=completing(CanaryEndpointId),
            show_default=False,
            help="Default: every canary endpoint.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a canary endpoint splits its traffic, its lease, and how each deployment did there in the last hour."""
    with reported(), connected() as client:
        if endpoint_id is None:
            found = list(client.canary_endpoints.iterate(limit=100))
        else:
            found = [client.canary_endpoints.get(endpoint_id)]
        reports = [report_on(client, one) for one in found]
        if as_json:
            show_json(reports[0] if endpoint_id else reports)
            return
        if is_terminal() and reports:
            for number, report in enumerate(reports):
                write(f"{chr(10) if number else ''}{_headline(report)}")
                show_rows(report["deployments"], COLUMNS)
        else:
            rows = (
                {"endpoint": report["id"], "lease_ends_at": report["lease_ends_at"], **member}
                for report in reports
                for member in report["deployments"]
            )
            show_rows(rows, ("endpoint", "lease_ends_at", *COLUMNS))


def report_on(client: "Client", endpoint: "CanaryEndpoint") -> Row:
    """An endpoint with the known facts about its deployments."""
    from tuneship.contract.errors import ResourceNotFound  # noqa: PLC0415 - starts slowly

    members: list[Row] = []
    for member in endpoint.deployments:
        shown: Row = {"share": member.traffic_percentage, "deployment": member.id}
        try:
            deployment = client.deployments.get(member.id)
            metrics = client.deployments.metrics(member.id, endpoint_id=endpoint.id, interval="1h")
        except ResourceNotFound:  # a day after it was deleted
            members.append({**shown, "status": "deleted"})
            continue
        errors, latency = metrics.summary.error_rate, metrics.summary.latency
        shown |= {
            "name": deployment.deployment_name,
            "status": deployment.status,
            "health": deployment.health,
            "requests": None if errors is None else errors.request_count,
            "errors": None if errors is None else errors.error_count,
            "p95_ms": None if latency is None or latency.p95 is None else round(latency.p95, 1),
        }
        members.append(shown)
    lease = endpoint.lease
    return {
        "id": endpoint.id,
        "name": endpoint.name,
        "status": endpoint.status,
        "updated_at": render_time(endpoint.updated_at),
        "lease_ends_at": None if lease is None else render_time(lease.expires_at),
        "deployments": members,
    }


def _headline(report: Row) -> str:
    lease = report["lease_ends_at"]
    if lease is None:
        held = "no lease"
    else:
        left = datetime.fromisoformat(lease) - datetime.now(UTC)
        held = f"lease ends in {max(0, round(left.total_seconds()))} s"
    words = (report["id"], report["name"], report["status"], held)
    return "  ".join(map(one_line, words))
