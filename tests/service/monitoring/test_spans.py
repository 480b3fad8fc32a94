"""Requests and jobs become spans at a real OTLP collector, continue their caller's trace, and never hold a text."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from pydantic import ValidationError

from tests.support.fakes.collector import Collector, ReceivedSpan, running_collector
from tests.support.service.in_process import ANSWER, LINES, Service, jsonl
from tests.support.service.processes import Serve
from tests.support.waiting import until
from tuneship.contract.datasets import DatasetUpload
from tuneship.service.monitoring.otlp_spans import tracing_of
from tuneship.settings import ServiceSettings

PLANTED = "planted-Huntington"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": f"vendor={PLANTED}"}


class Traced:
    """A service with a collector, a tuned model and deployments."""

    def __init__(self, service: Service, collector: Collector) -> None:
        self.service = service
        self.collector = collector
        content = jsonl(*({"instruction": PLANTED, "response": PLANTED} for _ in LINES))
        dataset = service.dataset(content=content, name=PLANTED)
        self.job = service.job(dataset_id=dataset, model_name=PLANTED, tags={"k": PLANTED})
        trainer = service.trainer_of(self.job)
        trainer.start_of(2)
        trainer.step(1)
        trainer.step(2)
        trainer.complete()
        service.until(lambda: service.job_status(self.job) == "completed")
        found = service.call("GET", f"/v1/fine-tuning/jobs/{self.job}").json()
        self.model = found["fine_tuned_model"]
        self.deployment = service.deployment(f"{PLANTED}-one", model_name=self.model)
        faults = {"fault.error_rate": "1"}
        self.bad = service.deployment(f"{PLANTED}-bad", tags=faults)
        self.endpoint = service.endpoint(f"{PLANTED}-front", self.deployment)

    def ask(self, path: str, body: dict[str, Any], **headers: str) -> str:
        """Send a generation and return the id of its request."""
        answer = self.service.call("POST", path, json=body, headers=headers)
        return answer.headers["x-request-id"]

    def span(self, request_id: str) -> ReceivedSpan:
        def found() -> list[ReceivedSpan]:
            spans = self.collector.spans
            return [one for one in spans if one.attributes.get("tuneship.request_id") == request_id]

        until(found)
        (span,) = found()
        return span


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with running_collector() as collector:
        settings = {"otlp_endpoint": collector.url, "allow_fault_injection": True}
        with Service(tmp_path_factory.mktemp("traced"), **settings) as service:
            yield Traced(service, collector)


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_is_a_server_span_with_the_names_of_the_conventions(
    traced: Traced, stream: bool
) -> None:
    body = {"prompt": PLANTED, "max_tokens": 50, "temperature": 0.5, "stream": stream}
    span = traced.span(traced.ask(f"/v1/endpoints/{traced.endpoint}/generate", body))
    assert (span.name, span.raw.kind) == ("text_completion tuneship-tiny", Span.SPAN_KIND_SERVER)
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/endpoints/{endpoint_id}/generate",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tuneship",
        "gen_ai.request.model": "tuneship-tiny",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stream": stream,
        "gen_ai.response.finish_reasons": ["stop"],
        "tuneship.deployment_id": traced.deployment,
        "tuneship.endpoint_id": traced.endpoint,
        "tuneship.job_id": traced.job,
        "tuneship.operation": "generate_by_endpoint",
    }
    assert expected.items() <= span.attributes.items()
    tokenizer: Any = traced.service.parts.catalogue.default.tokenizer
    written = len(tokenizer.encode(ANSWER, add_special_tokens=False).ids)
    assert span.attributes["gen_ai.usage.output_tokens"] == written
    assert span.attributes["gen_ai.usage.input_tokens"] > 0
    assert span.events == ["gen_ai.first_token"]
    raw, first = span.raw, span.raw.events[0].time_unix_nano
    assert raw.start_time_unix_nano < first <= raw.end_time_unix_nano
    wait_s = span.attributes["gen_ai.response.time_to_first_chunk"]
    assert 0 < wait_s <= (raw.end_time_unix_nano - raw.start_time_unix_nano) / 1e9


def test_a_request_continues_the_trace_of_its_caller_without_its_tracestate(traced: Traced) -> None:
    path = f"/v1/deployments/{traced.deployment}/generate"
    span = traced.span(traced.ask(path, {"prompt": "a"}, **TRACEPARENT))
    assert (span.trace_id, span.parent_id, span.raw.trace_state) == (TRACE, PARENT, "")
    own = traced.span(traced.ask(path, {"prompt": "a"}))
    assert own.parent_id == ""
    wrong = traced.span(traced.ask(path, {"prompt": "a"}, traceparent=PLANTED))
    assert wrong.parent_id == ""
    assert len({TRACE, own.trace_id, wrong.trace_id}) == 3


def test_a_trace_that_its_caller_does_not_sample_is_not_sent(traced: Traced) -> None:
    path = f"/v1/deployments/{traced.deployment}/generate"
    silent = traced.ask(path, {"prompt": "a"}, traceparent=f"00-{TRACE}-{PARENT}-00")
    # Spans arrive in the order in which they ended.
    traced.span(traced.ask(path, {"prompt": "a"}))
    ids = {one.attributes.get("tuneship.request_id") for one in traced.collector.spans}
    assert silent not in ids


def test_the_wire_of_openai_has_the_same_spans(traced: Traced) -> None:
    body = {"model": traced.deployment, "messages": [{"role": "user", "content": PLANTED}]}
    span = traced.span(traced.ask("/openai/v1/chat/completions", body))
    assert span.name == "chat tuneship-tiny"
    assert span.attributes["http.route"] == "/openai/v1/chat/completions"
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["tuneship.deployment_id"] == traced.deployment


def test_an_error_of_the_service_is_one_of_the_span_and_a_refusal_is_none(traced: Traced) -> None:
    failed = traced.span(traced.ask(f"/v1/deployments/{traced.bad}/generate", {"prompt": PLANTED}))
    assert failed.raw.status.code == Status.STATUS_CODE_ERROR
    assert failed.raw.status.message == ""
    assert failed.attributes["error.type"] == "internal_error"
    assert failed.attributes["http.response.status_code"] == 500
    body = {"prompt": PLANTED, "temperature": 9}
    refused = traced.span(traced.ask(f"/v1/deployments/{traced.deployment}/generate", body))
    assert refused.raw.status.code == Status.STATUS_CODE_UNSET
    assert refused.attributes["http.response.status_code"] == 422
    assert "error.type" not in refused.attributes


def test_operations_of_the_control_plane_have_spans_by_route(traced: Traced) -> None:
    until(lambda: traced.collector.of("create_deployment"))
    span = traced.collector.of("create_deployment")[0]
    assert span.name == "POST /v1/deployments"
    assert span.attributes["http.response.status_code"] == 201
    answer = traced.service.call("GET", f"/v1/models/{traced.model}/limits")
    limits = traced.span(answer.headers["x-request-id"])
    assert limits.attributes["http.route"] == "/v1/models/{model_id}/limits"


def test_a_job_is_a_span_from_its_first_attempt_to_its_end(traced: Traced) -> None:
    def jobs() -> list[ReceivedSpan]:
        return [one for one in traced.collector.spans if one.name.startswith("fine_tuning ")]

    until(jobs)
    (span,) = jobs()
    assert (span.name, span.raw.kind) == ("fine_tuning tuneship-tiny", Span.SPAN_KIND_INTERNAL)
    record = {"status": "completed", "attempts": 1, "steps": 2, "epochs": 1}
    assert {f"tuneship.job.{name}": value for name, value in record.items()}.items() <= (
        span.attributes.items()
    )
    assert span.attributes["tuneship.job_id"] == traced.job
    assert span.raw.start_time_unix_nano < span.raw.end_time_unix_nano
    failing = traced.service.job(model_name=PLANTED)
    trainer = traced.service.trainer_of(failing)
    trainer.say({"kind": "failed", "reason": "diverged", "message": PLANTED})
    trainer.code = 1
    until(lambda: len(jobs()) == 2)
    failed = jobs()[1]
    assert failed.attributes["tuneship.job.status"] == "failed"
    assert failed.attributes["error.type"] == "diverged"
    assert failed.raw.status.code == Status.STATUS_CODE_ERROR


def test_no_span_holds_a_text_or_a_name(traced: Traced) -> None:
    last = traced.span(traced.ask(f"/v1/deployments/{PLANTED}/generate", {"prompt": PLANTED}))
    assert last.attributes["http.route"] == "/v1/deployments/{deployment_id}/generate"
    sent = b"".join(traced.collector.bodies)
    secrets = (PLANTED, "planted", ANSWER, "alice", "tsk_", "case 0", traced.model)
    assert not any(secret.encode() in sent for secret in secrets)
    assert traced.collector.paths == {"/v1/traces"}
    assert {one["service.name"] for one in traced.collector.resources} == {"tuneship"}


def test_a_caller_without_a_valid_key_makes_no_span(traced: Traced) -> None:
    refused = traced.service.call("GET", "/v1/models", None, headers=TRACEPARENT)
    assert refused.status_code == 401
    traced.span(traced.service.call("GET", "/v1/models").headers["x-request-id"])
    identifier = refused.headers["x-request-id"]
    assert identifier not in {
        one.attributes.get("tuneship.request_id") for one in traced.collector.spans
    }


def test_requests_are_answered_while_the_collector_hangs(tmp_path: Path) -> None:
    with running_collector() as collector:
        collector.answers.clear()
        with Service(tmp_path / "data", otlp_endpoint=collector.url) as service:
            deployment = service.deployment("one")
            for _ in range(20):
                answer = service.call(
                    "POST", f"/v1/deployments/{deployment}/generate", json={"prompt": "a"}
                )
                assert answer.status_code == 200
            assert collector.spans == []
            collector.answers.set()
            until(lambda: len(collector.of("generate")) == 20)


def test_nothing_of_opentelemetry_is_loaded_without_an_endpoint() -> None:
    program = (
        "import sys\nfrom tuneship.service import serve\nfrom tuneship.settings import ServiceSettings\n"
        "from tuneship.service.monitoring.otlp_spans import tracing_of\n"
        "assert tracing_of(ServiceSettings()) is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_without_the_libraries_the_service_runs_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert tracing_of(ServiceSettings(otlp_endpoint="http://127.0.0.1:4318")) is None
    assert "install `tuneship[otel]`" in caplog.text


@pytest.mark.parametrize("variable", ["TUNESHIP_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"])
def test_either_variable_names_the_endpoint(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "http://collector:4318")
    assert ServiceSettings().otlp_endpoint == "http://collector:4318"


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("collector:4317", "must begin with http:// or https://"),
        ("http://", "name a host"),
        ("http://user:secret@collector:4318", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("http://collector:4318?key=secret", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_an_endpoint_that_cannot_be_one_is_refused(endpoint: str, says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ServiceSettings(otlp_endpoint=endpoint)
    assert says in refused.value.errors()[0]["msg"]


@pytest.mark.slow
def test_the_service_sends_its_last_spans_when_it_ends(tmp_path: Path) -> None:
    with running_collector() as collector:
        serve = Serve(tmp_path / "data", otlp_endpoint=collector.url)
        try:
            client = serve.client()
            file = tmp_path / "rows.jsonl"
            file.write_bytes(jsonl(*LINES))
            with file.open("rb") as opened:
                client.datasets.upload(DatasetUpload(name="d", format="instruction"), opened)
        finally:
            serve.stop()
        assert [one.name for one in collector.of("upload_dataset")] == ["POST /v1/datasets"]
