"""A deployment's log on the wire: filters, pages, entries."""

from typing import Annotated

from pydantic import Field

from tuneship.contract.common import Reply, TimestampMs

LogFilter = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1000,
        pattern=r"^[^\x00-\x1f\x7f]*$",
        description="Conditions, 16 at most, joined by `,` or ` AND `: `level=error`, `level>=warning`, "
        "`component!=replica`, `request_id=req_...`, `message~text` (contains).",
    ),
]


LogToken = Annotated[
    str, Field(max_length=256, description="The last page's `pagination.next_token`.")
]


class DeploymentLogEntry(Reply):
    """One line of a deployment's log: never a prompt, a completion, a name or a tag."""

    timestamp: TimestampMs
    level: str
    message: str
    component: str
    request_id: str | None = None


class LogContinuation(Reply):
    """`next_token` continues behind this page; null on the last one."""

    next_token: str | None


class DeploymentLogs(Reply):
    """One page of a deployment's log, in the requested order."""

    logs: list[DeploymentLogEntry]
    pagination: LogContinuation
