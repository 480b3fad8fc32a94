"""How a generation ended: in the metrics of its deployment, in its log, and for the caller. Never with any text.

Each request that was routed is counted once: answered, failed, cancelled by a caller who hung up, or refused by the
deployment. What outlasts `generate_timeout_s` is the deployment's error.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tuneship.contract.errors import ApiError, DeploymentError, InternalError
from tuneship.metrics.observations import Observation, RequestOutcome
from tuneship.service.context.context import Context
from tuneship.service.models.handlers import ServedModel
from tuneship.store.deployment_logs import LogEntry
from tuneship.store.row_types import DeploymentRow


@dataclass(frozen=True)
class Routed:
    """Who answers: the deployment's record and its model."""

    deployment: DeploymentRow
    served: ServedModel
    endpoint_id: str = ""


@dataclass(frozen=True)
class Written:
    """What the model wrote."""

    completion: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


async def recorded(
    context: Context, routed: Routed, write: Callable[[], Awaitable[Written]], started: float
) -> Written:
    """Run it and record how it ended."""
    recorder, served_by = context.parts.recorder, {"X-Deployment-ID": routed.deployment["id"]}
    context.headers |= served_by
    try:
        written = await write()
    except asyncio.CancelledError:
        recorder.record(_observation(context, routed, RequestOutcome.CANCELLED, started))
        _log(context, routed, "info", "the caller hung up")
        raise
    except Exception as error:
        recorder.record(_observation(context, routed, _blame(error), started))
        _log(context, routed, *_line_of(error))
        if isinstance(error, ApiError):
            error.headers |= served_by  # who failed is what a canary's driver has to know
        raise
    recorder.record(_observation(context, routed, RequestOutcome.SUCCESS, started, written))
    return written


def _log(context: Context, routed: Routed, level: str, message: str) -> None:
    """A line of the deployment's log; what went well is in its metrics."""
    context.parts.deployment_log.add(
        LogEntry(
            routed.deployment["id"], context.now, level, "generate", message, context.request_id
        )
    )


def _line_of(error: Exception) -> tuple[str, str]:
    """Level and message of a generation that failed or was refused. Messages never hold what was sent."""
    if not isinstance(error, ApiError):
        return "error", "failed unexpectedly"
    text = f"{error.status} {error.code}: {error.message}"
    if _blame(error) is RequestOutcome.REFUSED:
        return "info", text
    return ("error" if isinstance(error, InternalError) else "warning"), text


def _blame(error: Exception) -> RequestOutcome:
    """A deployment that cannot serve is at fault even though the answer is a 409."""
    is_refusal = isinstance(error, ApiError) and error.status < 500
    if is_refusal and not isinstance(error, DeploymentError):
        return RequestOutcome.REFUSED
    return RequestOutcome.SERVER_ERROR


def _observation(
    context: Context,
    routed: Routed,
    outcome: RequestOutcome,
    started: float,
    written: Written | None = None,
) -> Observation:
    return Observation(
        deployment_id=routed.deployment["id"],
        endpoint_id=routed.endpoint_id,
        ended_at=context.now.timestamp(),
        outcome=outcome,
        latency_ms=(time.perf_counter() - started) * 1000,
        prompt_tokens=written.prompt_tokens if written else 0,
        completion_tokens=written.completion_tokens if written else 0,
        is_empty=written is not None and not written.completion.strip(),
        caller=_caller(context) if outcome is RequestOutcome.SERVER_ERROR else None,
    )


def _caller(context: Context) -> int:
    """Who asked: whom the routing key stands for, else the API key. Neither is kept."""
    key = context.routing_key
    name = f"key {context.trail.key_id}" if key is None else f"routing key {key}"
    return context.parts.recorder.number_of(name)
