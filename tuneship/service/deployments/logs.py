"""What reading a deployment's log does: filter, order, and a token that continues only what it was made for."""

from datetime import datetime
from typing import Literal

from tuneship.contract import deployments as contract
from tuneship.contract.deployments import DeploymentLogs
from tuneship.service.common.refusals import refuse_times_out_of_range, refused
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.deployments.handlers import own_deployment
from tuneship.service.deployments.log_filters import conditions_of
from tuneship.store import deployment_logs
from tuneship.store.deployment_logs import LogPosition, place_of
from tuneship.store.tables import deployment_logs as table


@serves(contract.get_deployment_logs)
def get_deployment_logs(  # noqa: PLR0913 - the description's own parameters and three names of one token
    context: Context,
    deployment_id: str,
    start_time: datetime | None = None,
    end_time: datetime | None = None,
    limit: int = 100,
    filter: str | None = None,  # noqa: A002 - the description's own name
    order: Literal["asc", "desc"] = "desc",
    next_token: str | None = None,
    after: str | None = None,
    cursor: str | None = None,
) -> DeploymentLogs:
    """One page; what happened just before the request is in it."""
    _check_span(start_time, end_time)
    where = [table.c.deployment_id == deployment_id, *conditions_of(filter)]
    if start_time is not None:
        where.append(table.c.timestamp >= start_time)
    if end_time is not None:
        where.append(table.c.timestamp < end_time)
    bound_to = f"{deployment_id}\n{order}\n{filter or ''}"
    sent = {"next_token": next_token, "after": after, "cursor": cursor}
    behind = _place(context, bound_to, sent)
    own_deployment(context, deployment_id)
    context.parts.store_logs()
    with context.read() as connection:
        found = deployment_logs.lines(
            connection, where, descending=order == "desc", after=behind, limit=limit + 1
        )
    token = None
    if len(found) > limit:
        last = LogPosition(found[limit - 1]["timestamp"], found[limit - 1]["id"])
        token = context.parts.cursors.issue(bound_to, last.as_number())
    return DeploymentLogs.model_validate(
        {"logs": found[:limit], "pagination": {"next_token": token}}
    )


def _check_span(start: datetime | None, end: datetime | None) -> None:
    refuse_times_out_of_range(start_time=start, end_time=end)
    if start is not None and end is not None and start >= end:
        raise refused("start_time", "must be before end_time")


def _place(context: Context, bound_to: str, sent: dict[str, str | None]) -> LogPosition | None:
    """Where the page before ended. A token of another deployment, filter or order is refused."""
    given = {name: token for name, token in sent.items() if token is not None}
    if not given:
        return None
    name, token = next(iter(given.items()))
    if len(given) > 1:
        raise refused(name, "must be sent under one name only")
    return place_of(context.parts.cursors.position(bound_to, token, name))
