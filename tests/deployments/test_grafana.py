"""The board and the alert rules of `deployments/grafana/` use what a real service reports, and Prometheus runs them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.service.processes import ROOT, Serve
from tests.support.waiting import PATIENCE_S, free_port, until
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.endpoints import CanaryEndpointCreate, Member
from tuneship.contract.errors import ApiError
from tuneship.contract.generation import Generate
from tuneship.contract.webhooks import WebhookCreate
from tuneship.service.monitoring.metric_list import ALL

FOLDER = ROOT / "deployments" / "grafana"
RULES = FOLDER / "tuneship-alerts.yml"
BOARD: dict[str, Any] = json.loads((FOLDER / "tuneship-board.json").read_text())
ALERTS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
VARIABLES = {"$__rate_interval": "1m", "$deployment": ".*", "$job": "tuneship"}
# Labels that Prometheus adds, and metrics of its own.
ADDED_LABELS, ADDED_METRICS = {"job", "instance", "le"}, {"up"}
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


def board_queries() -> dict[str, str]:
    """Every query of the board with its variables filled in, by panel and letter."""
    found: dict[str, str] = {}
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, filled in VARIABLES.items():
                expression = expression.replace(name, filled)
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


EXPRESSIONS = board_queries() | {rule["alert"]: rule["expr"] for rule in ALERTS}


class Watched:
    """A real service with traffic, some of which fails."""

    def __init__(self, serve: Serve) -> None:
        self.serve = serve
        self.client = serve.client()
        create = self.client.deployments.create
        good = create(DeploymentCreate(model_name="tuneship-tiny", deployment_name="good"))
        faults = {"fault.error_rate": "1"}
        bad = create(
            DeploymentCreate(model_name="tuneship-tiny", deployment_name="bad", tags=faults)
        )
        self.good, self.bad = good.id, bad.id
        for one in (good, bad):
            until(lambda one=one: self.client.deployments.get(one.id).status == "running")
        members = [
            Member(id=good.id, traffic_percentage=90),
            Member(id=bad.id, traffic_percentage=10),
        ]
        self.client.canary_endpoints.create(
            CanaryEndpointCreate(name="canary", deployments=members)
        )
        hook = WebhookCreate(url="https://93.184.215.14/hook", events=["dataset.*"])
        self.client.webhooks.create(hook)
        self.ask()
        until(lambda: "tuneship_replica_steps_total" in self.scrape())
        until(lambda: "tuneship_audit_head_age_seconds" in self.scrape())

    def ask(self) -> None:
        generate = Generate(prompt="a case", max_tokens=4)
        self.client.deployments.generate(self.good, generate)
        once = self.client.with_options(tries=1)
        with pytest.raises(ApiError):
            once.deployments.generate(self.bad, generate)

    def scrape(self) -> str:
        return self.client.monitoring.metrics()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched") / "data"
    serve = Serve(folder, "--allow-fault-injection", preload=True)
    try:
        yield Watched(serve)
    finally:
        serve.stop()


def used(expression: str) -> tuple[set[str], set[str]]:
    """The names of the metrics and of the labels in a PromQL expression."""
    metrics = set(re.findall(r"\b(?:tuneship_|process_)\w+|\bup\b", expression))
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    for group in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", expression):
        labels |= {one.strip() for one in group.split(",")}
    return metrics, labels


def test_every_query_names_metrics_of_the_list() -> None:
    known = {one.name for one in ALL}
    for name, expression in EXPRESSIONS.items():
        metrics, _ = used(expression)
        assert metrics, name
        plain = {re.sub(r"_(bucket|sum|count)$", "", one) for one in metrics}
        assert {one for one in plain if one.startswith("tuneship_")} <= known, name


@pytest.mark.slow
def test_every_metric_and_label_in_use_exists_in_a_real_scrape(watched: Watched) -> None:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(watched.scrape()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    # The list of the docs, complete with a real replica.
    names = {re.sub(r"_(bucket|sum|count)$", "", one) for one in found}
    assert {one.name for one in ALL} - names == set()
    for name, expression in EXPRESSIONS.items():
        metrics, labels = used(expression)
        assert metrics - ADDED_METRICS <= set(found), name
        known = set[str]().union(*(found.get(metric, set()) for metric in metrics))
        assert labels - ADDED_LABELS <= known, name


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of the package prometheus")
def test_promtool_parses_every_rule_and_every_query_of_the_board(tmp_path: Path) -> None:
    queries = [
        {"record": f"board:query{number}", "expr": expression}
        for number, expression in enumerate(board_queries().values())
    ]
    board = tmp_path / "board.yml"
    board.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": queries}]}))
    for file in (RULES, board):
        command = [str(PROMTOOL), "check", "rules", str(file)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr


@pytest.fixture
def prometheus(watched: Watched, tmp_path: Path) -> Iterator[str]:
    """The address of a real Prometheus that scrapes the service as the docs say, with the alert rules."""
    key = tmp_path / "tuneship.key"
    key.write_text(watched.client.settings.api_key.get_secret_value())
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "tuneship",
                "authorization": {"credentials_file": str(key)},
                "static_configs": [{"targets": [watched.serve.url.removeprefix("http://")]}],
            }
        ],
    }
    file, port = tmp_path / "prometheus.yml", free_port()
    file.write_text(yaml.safe_dump(config))
    options = [f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    options += [f"--web.listen-address=127.0.0.1:{port}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([str(PROMETHEUS), *options], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def asked(url: str, path: str, **query: str) -> Any:
    try:
        answer = httpx.get(f"{url}/{path}", params=query, trust_env=False)
    except httpx.TransportError:
        return None
    return answer.json()["data"] if answer.is_success else None


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus")
def test_a_real_prometheus_scrapes_the_service_and_fills_every_panel(
    watched: Watched, prometheus: str
) -> None:
    def results(expression: str) -> list[Any]:
        return (asked(prometheus, "query", query=expression) or {"result": []})["result"]

    until(lambda: [one["value"][1] for one in results('up{job="tuneship"}')] == ["1"])
    scraped_before = len(results("tuneship_generations_total"))
    assert scraped_before
    watched.ask()
    empty = set(board_queries())

    def is_every_panel_filled() -> bool:
        watched.ask()
        empty.difference_update({name for name in empty if results(board_queries()[name])})
        return not empty

    until(is_every_panel_filled)
    rules = asked(prometheus, "rules")["groups"][0]["rules"]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in ALERTS}
    until(
        lambda: (
            {rule["health"] for rule in asked(prometheus, "rules")["groups"][0]["rules"]} == {"ok"}
        )
    )
    failing = next(rule for rule in rules if rule["name"] == "TuneshipGenerationsFail")
    assert failing["query"]

    def failing_deployments() -> set[str]:
        alerts = asked(prometheus, "alerts")["alerts"]
        return {
            alert["labels"]["deployment_id"]
            for alert in alerts
            if alert["labels"]["alertname"] == "TuneshipGenerationsFail"
        }

    until(lambda: failing_deployments() == {watched.bad})
