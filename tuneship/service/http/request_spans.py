"""The span of one request: its operation, its status, and what its handler noted."""

import re
import time
from datetime import datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from tuneship.contract.declaring.operation import Operation
from tuneship.service.telemetry.tracing import NANOSECONDS, EndedSpan, SpanNotes

TRACEPARENT = "traceparent"


def request_span(scope: Scope, status: int, started: float, now: datetime) -> EndedSpan | None:
    """The span of a request that has ended now; None where it reached no operation.

    `started` is by `time.perf_counter`, `status` 0 where the caller disconnected before the answer began.
    """
    state = scope["state"]
    operation: Operation[..., Any] | None = state.get("operation")
    if operation is None:
        return None
    notes: SpanNotes = state["span"]
    route = re.sub(r":path}", "}", operation.path)
    ended = time.perf_counter()
    end_ns = int(now.timestamp() * NANOSECONDS)

    def since_epoch(moment: float) -> int:
        return end_ns - int((ended - moment) * NANOSECONDS)

    return EndedSpan(
        name=notes.name or f"{operation.method} {route}",
        start_ns=since_epoch(started),
        end_ns=end_ns,
        attributes={
            "http.request.method": operation.method,
            "http.route": route,
            **({"http.response.status_code": status} if status else {}),
            "tuneship.operation": operation.name,
            "tuneship.request_id": state["request_id"],
            **notes.attributes,
        },
        events=[(name, since_epoch(moment)) for name, moment in notes.events],
        error=notes.error or (str(status) if status >= 500 else ""),
        traceparent=Headers(scope=scope).get(TRACEPARENT, ""),
        is_request=True,
    )
