"""The facts for spans, sent to an OpenTelemetry collector if the installation has one.

A span is made when its request or job has ended, from what was noted on the way: numbers, ids and the service's own
words, never a text. Knows no library; `monitoring/otlp_spans.py` sends the spans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

# In a second.
NANOSECONDS = 1_000_000_000
AttributeValue = str | bool | int | float | Sequence[str]


@dataclass
class SpanNotes:
    """The notes about one request, made while it is answered."""

    # A better name than method and route.
    name: str = ""
    attributes: dict[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    # Moments by `time.perf_counter`, with the names of what happened.
    events: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    # The code of an error for which the service is to blame, although the answer may have begun with a 200.
    error: str = ""


@dataclass(frozen=True)
class EndedSpan:
    """A span that has ended; times are nanoseconds since the epoch."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    events: Sequence[tuple[str, int]] = ()
    error: str = ""
    # The W3C header `traceparent` of the request, by which the span continues its caller's trace.
    traceparent: str = ""
    is_request: bool = False


class Tracing(Protocol):
    """Takes ended spans."""

    def record(self, span: EndedSpan) -> None:
        """Queue a span to be sent; returns at once, from any thread."""
        ...

    def close(self) -> None:
        """Send what is queued; may block for seconds."""
        ...
