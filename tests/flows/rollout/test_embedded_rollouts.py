"""A script that starts its own service gets a new address each time, and its rollouts are still found."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL

from flows.rollout.record_file import RecordFile
from flows.script.local_processes import embedded_service
from tests.flows.conftest import PATIENCE_S, SCRIPT, plan, wait_for
from tests.support.service.processes import running_deployment
from tuneship.client import Client
from tuneship.contract.endpoints import CanaryEndpoint
from tuneship.gates.plan import CanaryPlan
from tuneship.prefect.connection import connect, disconnect, service_name
from tuneship.settings import ClientSettings, PipelineSettings, written_url

BASE_MODEL = "tuneship-tiny"


@contextmanager
def connected(url: str) -> Iterator[None]:
    connect(ClientSettings(url=url))
    try:
        yield
    finally:
        disconnect()


def name_of_service(url: str) -> str:
    with connected(url):
        return service_name()


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("TUNESHIP_DATA_DIR", str(folder))
    return folder


def runs_at(data_dir: Path, url: str) -> None:
    (data_dir / "service.json").write_text(json.dumps({"url": url, "pid": 1}))


def test_the_service_of_the_data_directory_keeps_its_name_when_its_port_changes(
    data_dir: Path,
) -> None:
    for url in ("http://127.0.0.1:41001", "http://127.0.0.1:41002"):
        runs_at(data_dir, url)
        assert name_of_service(url) == name_of_service(f"{url}/v1/") == str(data_dir)


def test_the_name_stays_while_a_process_is_connected(data_dir: Path) -> None:
    runs_at(data_dir, "http://127.0.0.1:41001")
    with connected("http://127.0.0.1:41001"):
        runs_at(data_dir, "http://127.0.0.1:41002")
        assert service_name() == str(data_dir)


@pytest.mark.parametrize("url", ["http://127.0.0.1:41002", "https://models.example.org"])
def test_every_other_service_has_its_address(data_dir: Path, url: str) -> None:
    assert name_of_service(url) == url
    runs_at(data_dir, "http://127.0.0.1:41001")
    assert name_of_service(url) == url


@pytest.mark.parametrize(
    ("spelled", "one"),
    [
        ("http://LocalHost:8700/v1/", "http://127.0.0.1:8700"),
        ("http://[::1]:8700", "http://127.0.0.1:8700"),
        ("HTTPS://Models.Example.ORG:443/", "https://models.example.org"),
        ("http://models:80/v1", "http://models"),
        ("https://models.:8443", "https://models:8443"),
        ("https://example.org/Team/v1", "https://example.org/Team"),
        ("http://[FD00::1]:80", "http://[fd00::1]"),
    ],
)
def test_every_spelling_of_an_address_is_one_service(
    data_dir: Path, spelled: str, one: str
) -> None:
    assert name_of_service(spelled) == name_of_service(one) == one


def test_the_service_of_the_data_directory_is_known_by_every_name_of_this_host(
    data_dir: Path,
) -> None:
    runs_at(data_dir, "http://127.0.0.1:41001")
    assert name_of_service("http://localhost:41001/v1") == str(data_dir)


@pytest.mark.parametrize("text", ["", "{}", '{"url": "http://127.0.0.1'])
def test_a_damaged_file_of_the_data_directory_names_no_service(data_dir: Path, text: str) -> None:
    (data_dir / "service.json").write_text(text)
    assert written_url(data_dir) is None
    url = "http://127.0.0.1:41001"
    assert name_of_service(url) == url


def test_an_address_that_other_hosts_know_stays_the_name(data_dir: Path) -> None:
    runs_at(data_dir, "https://models.example.org")
    assert name_of_service("https://models.example.org") == "https://models.example.org"


@pytest.mark.prefect
@pytest.mark.slow
def test_a_killed_script_with_its_own_service_is_gone_on_with_by_the_same_command(
    prefect_api: None, records: Path, data_dir: Path, tmp_path: Path
) -> None:
    environment = script_environment()
    wanted = prepared(data_dir, environment)
    params, result = tmp_path / "plan.json", tmp_path / "result.json"
    params.write_text(json.dumps({"plan": wanted.model_dump(mode="json")}))
    command = [sys.executable, str(SCRIPT), "--params", str(params), "--result", str(result)]

    def start() -> "subprocess.Popen[Any]":
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    first = start()
    try:
        wait_for(lambda: any(file.record.weight == 10 for file in rollouts(records)))
    finally:
        first.kill()
        first.wait()
    (left,) = rollouts(records)
    assert left.is_open

    second = start()
    try:
        code = second.wait(2 * PATIENCE_S)
    finally:
        second.kill()
        second.wait()

    (ended,) = rollouts(records)
    assert ended.path == left.path, "the second service has another port, not another folder"
    assert ended.record.facts[: len(left.record.facts)] == left.record.facts
    assert not ended.is_open
    said = json.loads(result.read_text())
    assert (code, said["outcome"]) == (4, "rolled_back"), said
    assert shares(endpoint(data_dir, environment)) == {
        wanted.baseline_deployment_id: 100,
        wanted.candidate_deployment_id: 0,
    }


@pytest.mark.slow
@pytest.mark.soak
def test_a_service_that_is_about_to_end_is_waited_for(data_dir: Path) -> None:
    """A killed script leaves such a service behind when the same command is repeated at once."""
    wanted = PipelineSettings(data_dir=data_dir)
    with embedded_service(wanted):
        pass
    log = data_dir / "service.log"
    with (data_dir / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def end() -> None:
            wait_for(lambda: log.is_file() and "another service runs" in log.read_text())
            fcntl.flock(lock, fcntl.LOCK_UN)

        ending = Thread(target=end)
        ending.start()
        with embedded_service(wanted) as settings, Client(settings) as client:
            assert client.models.list().models
        ending.join()


def script_environment() -> dict[str, str]:
    """The environment of a script that starts its own service."""
    kept = {name: value for name, value in os.environ.items() if name != "TUNESHIP_URL"}
    own = {"PREFECT_API_URL": PREFECT_API_URL.value() or "", "PYTHONPATH": str(SCRIPT.parents[1])}
    return kept | own


def prepared(data_dir: Path, environment: dict[str, str]) -> CanaryPlan:
    """Deploy a pair and return a plan for it without traffic: its rollout ends by its number of looks."""
    with (
        embedded_service(PipelineSettings(data_dir=data_dir), environment) as settings,
        Client(settings) as client,
    ):
        pair = [running_deployment(client, name, BASE_MODEL) for name in ("before", "after")]
    return plan(
        baseline_deployment_id=pair[0],
        candidate_deployment_id=pair[1],
        interval="1s",
        look_every_seconds=0.5,
        steps=[10, 100],
        max_looks_per_step=40,
        wait_for_traffic="20s",
    )


def rollouts(records: Path) -> list[RecordFile]:
    return [RecordFile(path) for path in sorted(records.glob("*/rollout-*.jsonl"))]


def endpoint(data_dir: Path, environment: dict[str, str]) -> CanaryEndpoint:
    with (
        embedded_service(PipelineSettings(data_dir=data_dir), environment) as settings,
        Client(settings) as client,
    ):
        (only,) = client.canary_endpoints.list(name="shop").canary_endpoints
        return client.canary_endpoints.get(only.id)


def shares(found: CanaryEndpoint) -> dict[str, int]:
    return {one.id: one.traffic_percentage for one in found.deployments}
