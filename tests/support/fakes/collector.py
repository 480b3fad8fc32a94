"""An OpenTelemetry collector: an HTTP server that parses the real protobuf of OTLP."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class ReceivedSpan:
    """A span as it came; `raw` is the message of the protocol."""

    name: str
    attributes: dict[str, Any]
    events: list[str]
    trace_id: str
    parent_id: str
    raw: Any


@dataclass
class Collector:
    """The spans that came so far, the bytes that held them, and the resources that sent them."""

    spans: list[ReceivedSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    # While cleared, requests are not answered.
    answers: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def take(self, body: bytes, path: str) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.bodies.append(body)
        self.paths.add(path)
        for resource in request.resource_spans:
            self.resources.append(attributes_of(resource.resource))
            for scope in resource.scope_spans:
                for span in scope.spans:
                    events = [event.name for event in span.events]
                    ids = span.trace_id.hex(), span.parent_span_id.hex()
                    self.spans.append(
                        ReceivedSpan(span.name, attributes_of(span), events, *ids, span)
                    )

    def of(self, operation: str) -> list[ReceivedSpan]:
        return [one for one in self.spans if one.attributes.get("tuneship.operation") == operation]


def attributes_of(message: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in message.attributes}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()
    collector.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.answers.wait(60)
            collector.take(body, self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield collector
        finally:
            collector.answers.set()
            server.shutdown()
