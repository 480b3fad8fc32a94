"""Prometheus reads the numbers of the API, each tenant only its own, and never a text or a name."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.support.service.in_process import ANSWER, Service
from tests.support.waiting import until
from tuneship.metrics.recorder import WindowKey
from tuneship.metrics.windows import MetricWindow
from tuneship.service.monitoring.metric_list import ALL

PLANTED = "planted-Huntington"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
ID = re.compile(r"(dep|ep|cep|wh)_[0-9a-z]{24}")
PROMTOOL = shutil.which("promtool")
DOCS = Path(__file__).parents[3] / "docs" / "observability.md"

Samples = Mapping[str, list[tuple[dict[str, str], float]]]


def scraped(service: Service, client: str = "alice", **options: Any) -> Samples:
    answer = service.call("GET", "/metrics", client, **options)
    assert answer.status_code == 200, answer.text
    return samples_of(answer.text)


def samples_of(text: str) -> Samples:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parse_text(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    own = samples.get(name, [])
    return sum(number for given, number in own if labels.items() <= given.items())


def generate(service: Service, path: str, count: int, **body: Any) -> None:
    for number in range(count):
        body = {"prompt": f"{PLANTED} {number}", **body}
        assert service.call("POST", f"{path}/generate", json=body).status_code == 200


class Busy:
    """A service with a tuned model, a canary, traffic with errors, a webhook and another tenant."""

    def __init__(self, service: Service) -> None:
        self.service = service
        hook = {"url": "https://93.184.215.14/" + PLANTED, "events": ["*"]}
        self.webhook = service.call("POST", "/v1/webhooks", json=hook).json()["id"]
        model = service.model()
        self.first = service.deployment(f"{PLANTED}-first", model_name=model)
        self.second = service.deployment(f"{PLANTED}-second", tags={"fault.error_rate": "1"})
        self.canary = service.canary(f"{PLANTED}-canary", {self.first: 90, self.second: 10})
        self.theirs = service.deployment("bobs", "bob")
        service.draws = lambda: 5000  # in the share of 90 %, whichever member comes first
        generate(service, f"/v1/deployments/{self.first}", 5)
        generate(service, f"/v1/deployments/{self.first}", 2, stream=True)
        generate(service, f"/v1/endpoints/{self.canary}", 3)
        for _ in range(4):
            failed = service.call(
                "POST", f"/v1/deployments/{self.second}/generate", json={"prompt": PLANTED}
            )
            assert failed.status_code == 500, failed.text
        embedded = [
            service.call("POST", f"{path}/embeddings", json={"input": [PLANTED] * texts}).json()
            for path, texts in (
                (f"/v1/deployments/{self.first}", 2),
                (f"/v1/endpoints/{self.canary}", 3),
            )
        ]
        self.embedded_tokens = [one["usage"]["prompt_tokens"] for one in embedded]
        too_long = {"prompt": "case " * 3000, "max_tokens": 1}
        refused = service.call("POST", f"/v1/deployments/{self.first}/generate", json=too_long)
        assert 400 <= refused.status_code < 500, refused.text
        assert service.call("GET", "/v1/deployments/dep_x").status_code == 404


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    with Service(tmp_path_factory.mktemp("busy"), allow_fault_injection=True) as service:
        made = Busy(service)
        # What the machine says of a replica and what the replica says of itself come at different times.
        late = {"tuneship_replica_memory_bytes", "tuneship_replica_slots"}
        until(lambda: late <= scraped(service).keys())
        yield made


def test_the_scrape_equals_the_metrics_of_the_api(busy: Busy) -> None:
    for deployment in (busy.first, busy.second):
        answer = busy.service.call("GET", f"/v1/deployments/{deployment}/metrics").json()
        samples = scraped(busy.service)

        def counted(
            name: str, samples: Samples = samples, of: str = deployment, **labels: str
        ) -> float:
            return value(samples, name, deployment_id=of, **labels)

        errors, tokens = answer["summary"]["error_rate"], answer["summary"]["token_usage"]
        success = counted("tuneship_generations_total", outcome="success")
        failed = counted("tuneship_generations_total", outcome="server_error")
        assert (success + failed, failed) == (errors["request_count"], errors["error_count"])
        series = answer["metrics"]["error_rate"]
        for outcome in ("cancelled", "refused"):
            assert counted("tuneship_generations_total", outcome=outcome) == sum(
                series[f"{outcome}_count"]
            )
        assert counted("tuneship_tokens_total", direction="input") == tokens["input"]
        assert counted("tuneship_tokens_total", direction="output") == tokens["output"]
        assert answer["in_flight"]["requests"] == counted("tuneship_generations_in_flight")
        histogram = answer["metrics"]["latency"]["histogram"]
        for number, edge in enumerate(histogram["le"]):
            label = "+Inf" if edge is None else str(edge / 1000)
            of_api = sum(row[number] for row in histogram["counts"])
            assert counted("tuneship_generation_duration_seconds_bucket", le=label) == of_api
    name = "tuneship_generation_duration_seconds_sum"
    summed = value(scraped(busy.service), name, deployment_id=busy.first)
    whole = busy.service.call("GET", f"/v1/deployments/{busy.first}/metrics").json()["summary"]
    assert summed == pytest.approx(whole["latency"]["average"] * 12 / 1000)


def test_embeddings_are_counted_with_their_texts_and_tokens(busy: Busy) -> None:
    samples = scraped(busy.service)
    kinds = ("embedding_requests", "embedded_texts", "embedded_tokens")
    names = [f"{kind}_total" for kind in kinds]
    counts = [value(samples, f"tuneship_{name}", deployment_id=busy.first) for name in names]
    assert counts == [2, 5, sum(busy.embedded_tokens)]
    through = {"deployment_id": busy.first, "endpoint_id": busy.canary}
    counts = [value(samples, f"tuneship_{name}", **through) for name in names]
    assert counts == [1, 3, busy.embedded_tokens[1]]
    counts = [value(samples, f"tuneship_machine_{name}") for name in names]
    assert counts == [2, 5, sum(busy.embedded_tokens)]


def test_every_answer_has_a_first_token_before_its_last_one(busy: Busy) -> None:
    samples, first = scraped(busy.service), busy.first
    name = "tuneship_time_to_first_token_seconds"
    assert value(samples, f"{name}_count", deployment_id=first) == 10
    assert value(samples, f"{name}_count", deployment_id=first, endpoint_id=busy.canary) == 3
    until_first = value(samples, f"{name}_sum", deployment_id=first)
    until_last = value(samples, "tuneship_generation_duration_seconds_sum", deployment_id=first)
    assert 0 < until_first <= until_last


def test_states_split_and_backlog_are_those_of_the_rows(busy: Busy) -> None:
    samples = scraped(busy.service)
    assert value(samples, "tuneship_jobs", status="completed") == 1
    assert value(samples, "tuneship_datasets", status="processed") == 1
    assert value(samples, "tuneship_deployments", status="running") == 2
    assert value(samples, "tuneship_machine_deployments", status="running") == 3
    split = {"endpoint_id": busy.canary, "deployment_id": busy.second}
    assert value(samples, "tuneship_endpoint_traffic_percentage", **split) == 10
    own = {"deployment_id": busy.first}
    until(lambda: value(scraped(busy.service), "tuneship_deployment_healthy", **own) == 1)
    deliveries = f"/v1/webhooks/{busy.webhook}/deliveries?status=pending"

    def is_backlog_equal() -> bool:
        # An event may come between the two answers.
        total = busy.service.call("GET", deliveries).json()["pagination"]["total"]
        found = scraped(busy.service)
        names = "tuneship_webhook_deliveries_pending", "tuneship_machine_webhook_deliveries_pending"
        return total > 0 and {value(found, name) for name in names} == {total}

    until(is_backlog_equal)


def test_requests_are_counted_by_operation_and_class_of_status(busy: Busy) -> None:
    before, after = scraped(busy.service), scraped(busy.service)
    own = {"operation": "read_metrics", "status": "2xx"}
    name = "tuneship_requests_total"
    assert value(after, name, **own) == value(before, name, **own) + 1
    assert value(after, name, operation="generate", status="5xx") == 4
    assert value(after, name, operation="get_deployment", status="4xx") == 1
    count = value(after, "tuneship_request_duration_seconds_count", operation="generate")
    assert count == value(after, name, operation="generate")
    assert busy.service.call("GET", "/v1/jobs", None).status_code == 401
    keyless = value(scraped(busy.service), "tuneship_machine_requests_total", operation="none")
    assert keyless >= 1


def test_a_tenant_sees_its_own_series_and_the_machine_only_with_a_scope_for_it(busy: Busy) -> None:
    service = busy.service
    viewer = service.key_headers("alice", frozenset({"metrics:read"}))
    samples = scraped(service, None, headers=viewer)
    bases = tuple(one.name for one in ALL if one.is_machine)
    assert not any(name.startswith((*bases, "process_")) for name in samples)
    every = scraped(service)
    assert any(name.startswith("process_") for name in every)
    name = "tuneship_generations_total"
    assert value(samples, name) == value(every, name) > 0
    theirs = service.call("GET", "/metrics", "bob").text
    assert busy.theirs in theirs
    assert not any(one in theirs for one in (busy.first, busy.second, busy.canary, busy.webhook))
    assert busy.theirs not in service.call("GET", "/metrics").text
    without = service.key_headers("alice", frozenset({"machine:read", "jobs:read"}))
    assert service.call("GET", "/metrics", None, headers=without).status_code == 403


def test_the_key_alone_is_enough_and_a_wrong_client_is_refused(busy: Busy) -> None:
    headers = dict(busy.service.headers["alice"])
    del headers["X-Client-ID"]
    assert busy.service.call("GET", "/metrics", None, headers=headers).status_code == 200
    headers["X-Client-ID"] = "bob"
    assert busy.service.call("GET", "/metrics", None, headers=headers).status_code == 401
    assert busy.service.call("GET", "/metrics", None).status_code == 401


def test_labels_hold_ids_and_known_words_and_nothing_that_anybody_chose(busy: Busy) -> None:
    text = busy.service.call("GET", "/metrics").text
    secrets = (PLANTED, "planted", ANSWER, "alice", "bob", "93.184", "case 0")
    assert not any(secret in text for secret in secrets)
    for name, samples in samples_of(text).items():
        for labels, _ in samples:
            for label, given in labels.items():
                if label.endswith("_id"):
                    assert not given or ID.fullmatch(given), (name, label)
                elif label != "version":
                    assert re.fullmatch(r"[A-Za-z0-9_.+-]{1,48}", given), (name, label)


def test_both_formats_are_valid_and_hold_the_same_samples(busy: Busy) -> None:
    plain = busy.service.call("GET", "/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    opened = busy.service.call("GET", "/metrics", headers={"Accept": OPENMETRICS})
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    families = list(parse_openmetrics(opened.text))
    names = {sample.name for family in families for sample in family.samples}
    assert names == set(samples_of(plain.text))
    assert all(family.documentation for family in families)


def test_the_series_of_a_deleted_deployment_go_away_and_the_sums_stay(service: Service) -> None:
    gone, stays = service.deployment("gone"), service.deployment("stays")
    endpoint = service.endpoint("in front", stays)
    for path in (f"deployments/{gone}", f"deployments/{stays}", f"endpoints/{endpoint}"):
        generate(service, f"/v1/{path}", 2)
    before = scraped(service)
    assert service.call("DELETE", f"/v1/deployments/{gone}").status_code == 200
    assert service.call("DELETE", f"/v1/endpoints/{endpoint}").status_code == 200
    service.until(lambda: gone not in service.call("GET", "/metrics").text)
    after = scraped(service)
    assert endpoint not in service.call("GET", "/metrics").text
    assert value(after, "tuneship_generations_total", deployment_id=stays) == 2
    summed = "tuneship_machine_generations_total"
    assert value(after, summed) == value(before, summed) == 6
    # The hourly clean-up of the supervisor.
    service.rest()
    service.supervisor.records.forget_counts()
    assert {target[0] for target in service.parts.recorder._totals} == {stays}


def test_totals_never_fall_and_count_nothing_twice_when_storing_fails(service: Service) -> None:
    deployment = service.deployment("one")
    generate(service, f"/v1/deployments/{deployment}", 3)
    service.rest()
    recorder = service.parts.recorder

    def full_disk(_windows: Mapping[WindowKey, MetricWindow]) -> None:
        raise OSError

    assert value(scraped(service), "tuneship_generations_total") == 3
    generate(service, f"/v1/deployments/{deployment}", 2)
    for _ in range(2):
        with pytest.raises(OSError):
            recorder.hand_over(full_disk)
    assert value(scraped(service), "tuneship_generations_total") == 5
    assert value(scraped(service), "tuneship_generations_total") == 5


def test_running_and_waiting_requests_are_seen_while_they_do(service: Service) -> None:
    deployment = service.deployment("slow")
    service.engines.may_answer.clear()
    asking = service.ask("POST", f"/v1/deployments/{deployment}/generate", json={"prompt": "x"})
    asked = asyncio.run_coroutine_threadsafe(asking, service.loop)
    name = "tuneship_generations_queued"
    service.until(lambda: value(scraped(service), name, deployment_id=deployment) == 1)
    assert value(scraped(service), "tuneship_machine_generations_in_flight") == 1
    service.engines.may_answer.set()
    assert asked.result(60).status_code == 200
    assert value(scraped(service), name, deployment_id=deployment) == 0


def test_the_age_of_the_signed_head_is_since_it_last_stood_for_the_whole_chain(
    service: Service,
) -> None:
    assert "tuneship_audit_head_age_seconds" not in scraped(service)
    service.parts.signed_audit.complete_at = service.clock()
    service.clock.ahead = timedelta(seconds=90)
    assert 90 <= value(scraped(service), "tuneship_audit_head_age_seconds") < 600


def test_the_page_names_every_metric_with_its_labels_and_meaning(busy: Busy) -> None:
    rows = {
        cells[0].strip("` "): (cells[1].strip(), cells[2].strip(" "), cells[3].strip())
        for line in DOCS.read_text().splitlines()
        if line.startswith("| `tuneship_") and len(cells := line.strip("|").split("|")) == 4
    }
    expected = {
        one.name: (one.kind, ", ".join(f"`{label}`" for label in one.labels), one.meaning)
        for one in ALL
    }
    assert rows == expected
    types = {
        line.split()[2]: line.split()[3]
        for line in busy.service.call("GET", "/metrics").text.splitlines()
        if line.startswith("# TYPE tuneship_")
    }
    # The played replica reports no counts of its own; a slow test with a real one covers those.
    missing = {one.name for one in ALL if one.name not in types}
    assert missing <= {
        "tuneship_audit_head_age_seconds",
        *(one.name for one in ALL if one.name.startswith("tuneship_replica_")),
    }
    assert all(types[one.name] == one.kind for one in ALL if one.name not in missing)


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of the package prometheus")
def test_promtool_accepts_the_scrape(busy: Busy) -> None:
    text = busy.service.call("GET", "/metrics").text
    run = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
