"""Handler of a deployment's log: filters, orders and pages it, with tokens that are bound to their query."""

from datetime import datetime
from typing import Literal

from tuneship.contract import deployments as contract
from tuneship.contract.deployments import DeploymentLogs
from tuneship.service.answers.field_errors import field_error, refuse_times_out_of_range
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.deployments.log_filters import conditions_of
from tuneship.service.deployments.lookup import own_deployment
from tuneship.service.telemetry.record_keeper import store_logs
from tuneship.store.database.tables import deployment_logs as table
from tuneship.store.records import deployment_logs
from tuneship.store.records.deployment_logs import LogPosition, position_of


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
    """One page of the log, up to the lines just before the request."""
    refuse_times_out_of_range(start_time=start_time, end_time=end_time)
    if start_time is not None and end_time is not None and start_time >= end_time:
        raise field_error("start_time", "must be before end_time")
    where = [table.c.deployment_id == deployment_id, *conditions_of(filter)]
    if start_time is not None:
        where.append(table.c.timestamp >= start_time)
    if end_time is not None:
        where.append(table.c.timestamp < end_time)
    # A token of another deployment, filter or order is refused.
    bound_to = f"{deployment_id}\n{order}\n{filter or ''}"
    names = {"next_token": next_token, "after": after, "cursor": cursor}
    tokens = [(name, token) for name, token in names.items() if token is not None]
    if len(tokens) > 1:
        raise field_error(tokens[0][0], "must be sent under one name only")
    position = None
    for name, token in tokens:
        position = position_of(context.parts.cursors.position(bound_to, token, name))

    own_deployment(context, deployment_id)
    parts = context.parts
    store_logs(parts.deployment_log, parts.database, parts.clock)
    with context.read() as connection:
        # One more line than the page holds shows whether there is a next page.
        lines = deployment_logs.lines(
            connection, where, descending=order == "desc", after=position, limit=limit + 1
        )
    next_page = None
    if len(lines) > limit:
        last = LogPosition(lines[limit - 1]["timestamp"], lines[limit - 1]["id"])
        next_page = context.parts.cursors.issue(bound_to, last.as_number())
    page = {"logs": lines[:limit], "pagination": {"next_token": next_page}}
    return DeploymentLogs.model_validate(page)
