"""Prints what the monitoring costs: counting a request, making its span, and a scrape with 100 deployments.

    python benchmarks/monitoring.py

Processor time of one thread for the first three, the fastest of seven rounds; of the whole process for a scrape, the
fastest of five. The figures of `docs/observability.md` come from here.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.fakes.collector import running_collector
from tests.support.in_process import Service
from tuneship.contract.generation import generate
from tuneship.metrics.observations import Observation, RequestOutcome
from tuneship.metrics.windows import MetricWindow
from tuneship.service.common.request_counts import RequestCounts
from tuneship.service.common.tracing import SpanNotes
from tuneship.service.http.request_spans import request_span

ROUNDS = 7
SCRAPES = 5
DEPLOYMENTS = 100
REQUESTS_EACH = 200
ATTRIBUTES = 14
TRACEPARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def microseconds(work: Callable[[], object], times: int) -> float:
    fastest = float("inf")
    for _ in range(ROUNDS):
        begun = time.thread_time()
        for _ in range(times):
            work()
        fastest = min(fastest, (time.thread_time() - begun) / times)
    return fastest * 1e6


def measure_counting() -> None:
    counts, window = RequestCounts(), MetricWindow()
    request = microseconds(lambda: counts.count("client", "generate", 200, 0.0123), 20_000)
    whole = ("dep", "", 1.0, RequestOutcome.SUCCESS, 123.0, 5, 6)
    plain, with_token = Observation(*whole), Observation(*whole, first_token_ms=12.0)
    before = microseconds(lambda: window.add(plain), 20_000)
    after = microseconds(lambda: window.add(with_token), 20_000)
    print(f"counting a request: {request:.1f} us")
    print(f"the first token of a generation: {after - before:.1f} us more than {before:.1f}")


def measure_span(service: Service) -> None:
    notes = SpanNotes(name="text_completion tuneship-tiny", events=[("gen_ai.first_token", 1.0)])
    notes.attributes = {f"gen_ai.attribute_{number}": number for number in range(ATTRIBUTES)}
    state = {"operation": generate, "span": notes, "request_id": "req_1"}
    scope = {"state": state, "headers": [(b"traceparent", TRACEPARENT)]}
    tracing = service.parts.tracing

    def make() -> None:
        span = request_span(scope, 200, time.perf_counter(), service.clock())
        if tracing is None or span is None:
            raise RuntimeError("no span is made")
        tracing.record(span)

    print(f"a span: {microseconds(make, 300):.0f} us")


def measure_scrape(service: Service) -> None:
    dice, now = random.Random(1), time.time()  # noqa: TID251 - recorded as if it were now
    for number in range(DEPLOYMENTS):
        deployment = service.deployment(f"deployment {number}")
        endpoint = service.endpoint(f"endpoint {number}", deployment)
        for request in range(REQUESTS_EACH):
            target = deployment, endpoint if request % 2 else ""
            latency, first = dice.lognormvariate(4, 1), dice.lognormvariate(3, 1)
            service.parts.recorder.record(
                Observation(
                    *target, now, RequestOutcome.SUCCESS, latency, 5, 6, first_token_ms=first
                )
            )
    service.rest()
    service.call("GET", "/metrics")
    fastest, text = float("inf"), ""
    for _ in range(SCRAPES):
        begun = time.process_time()
        text = service.call("GET", "/metrics").text
        fastest = min(fastest, time.process_time() - begun)
    lines = text.count("\n")
    print(
        f"a scrape of {DEPLOYMENTS} deployments: {fastest * 1000:.0f} ms, {lines} lines, {len(text)} bytes"
    )


def main() -> None:
    measure_counting()
    with running_collector() as collector, tempfile.TemporaryDirectory() as folder:
        settings = {"otlp_endpoint": collector.url, "maximum_deployments": 2 * DEPLOYMENTS}
        with Service(Path(folder), **settings) as service:
            measure_span(service)
            measure_scrape(service)


if __name__ == "__main__":
    main()
