"""Sends spans to an OpenTelemetry collector, over OTLP with protobuf in HTTP. The only module that knows OpenTelemetry.

The extra `otel` installs the libraries, and they are loaded only where an endpoint is set. A thread of the SDK sends
the spans; when the collector is away they are dropped, and no request notices.
"""

import logging
from importlib.metadata import version
from typing import Any

from tuneship.service.telemetry.tracing import EndedSpan, Tracing
from tuneship.settings import TracingSettings

logger = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"
# Below the time that the service has for its end.
EXPORT_TIMEOUT_S = 3.0
EXPORT_EVERY_MS = 1000.0


def tracing_of(settings: TracingSettings) -> Tracing | None:
    """The exporter to the configured endpoint; None without one, or (logged) without the libraries."""
    if not settings.otlp_endpoint:
        return None
    try:
        return OtlpSpans(settings.otlp_endpoint)
    except ImportError:
        # Machines often set the standard variable for all programs, which must not keep this one from starting.
        logger.warning("no spans are sent: install `tuneship[otel]`, or unset the OTLP endpoint")
        return None


class OtlpSpans:
    """Makes spans of the SDK and hands them to its exporter; implements `Tracing`."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the collector's address without a path for traces; headers come from the standard variables."""
        # Loaded here: the service needs none of it otherwise.
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.context import Context  # noqa: PLC0415
        from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

        address = endpoint.rstrip("/") + TRACES_PATH
        exporter = trace_exporter.OTLPSpanExporter(address, timeout=EXPORT_TIMEOUT_S)
        # The standard variables go before the names that are given here.
        resource = Resource({"service.version": version("tuneship")}).merge(Resource.create())
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "tuneship"}))
        # The service ends it itself, with a time limit.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_EVERY_MS)
        )
        self._tracer = self._provider.get_tracer("tuneship", version("tuneship"))
        self._parent: Any = tracecontext.TraceContextTextMapPropagator().extract
        self._root = Context()
        self._kinds = {True: trace.SpanKind.SERVER, False: trace.SpanKind.INTERNAL}
        self._is_error = trace.StatusCode.ERROR

    def record(self, span: EndedSpan) -> None:
        """Queue a span to be sent; returns at once, from any thread."""
        context = self._root
        if span.traceparent:
            # Without `tracestate`, which may hold any text.
            context = self._parent({"traceparent": span.traceparent}, context=self._root)
        made = self._tracer.start_span(
            span.name,
            context,
            self._kinds[span.is_request],
            attributes=span.attributes,
            start_time=span.start_ns,
            record_exception=False,
        )
        for name, moment_ns in span.events:
            made.add_event(name, timestamp=moment_ns)
        if span.error:
            made.set_attribute("error.type", span.error)
            made.set_status(self._is_error)
        made.end(end_time=span.end_ns)

    def close(self) -> None:
        """Send what is queued; may block for seconds."""
        self._provider.shutdown()
