"""Fixtures that the flow tests share: fake services, a records folder and plans."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL

from tests.support.fakes.canary_service import BASELINE, CANDIDATE, FakeService
from tests.support.fakes.whole_service import WholeService
from tests.support.waiting import until
from tuneship.gates.plan import CanaryPlan
from tuneship.prefect.connection import connect, disconnect
from tuneship.settings import ClientSettings

PATIENCE_S = 300.0
SCRIPT = Path(__file__).parents[2] / "flows" / "shift_traffic.py"
SLOW_ENOUGH_TO_BE_STOPPED = 0.5
# Seconds between two looks: so many that nothing happens while a test examines a rollout.
STANDS_STILL = 60.0


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the records of this test's rollouts and releases; their reports lie beside it."""
    monkeypatch.setenv("TUNESHIP_RECORDS", str(tmp_path / "records"))
    monkeypatch.setenv("TUNESHIP_REPORTS", str(tmp_path / "reports"))
    return tmp_path / "records"


def use(service: FakeService) -> None:
    """Let every task talk to this service."""
    connect(ClientSettings(url=service.url, api_key="key", client_id="tests"))


@contextmanager
def in_use(
    service: WholeService, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WholeService]:
    """Let the flows use this service and write their reports into this folder until the end of the test."""
    monkeypatch.setenv("TUNESHIP_REPORTS", str(reports))
    with service as running:
        use(running)
        yield running
    disconnect()


@pytest.fixture
def service(
    prefect_api: None, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WholeService]:
    """A fake service with everything a whole release needs: data, jobs, deployments, an endpoint."""
    with in_use(WholeService(), tmp_path / "reports", monkeypatch) as running:
        yield running


@pytest.fixture
def fake(prefect_api: None, records: Path) -> Iterator[FakeService]:
    """Use a fake service, which a test can script before it starts the flow."""
    with FakeService() as service:
        use(service)
        yield service
    disconnect()


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until this happens, for `PATIENCE_S` seconds at most."""
    until(happened, PATIENCE_S)


def plan(**changes: Any) -> CanaryPlan:
    """The default plan for an endpoint that does not exist yet, with the fastest looks and a short bake."""
    fields: dict[str, Any] = {
        "endpoint_name": "shop",
        "baseline_deployment_id": BASELINE,
        "candidate_deployment_id": CANDIDATE,
        "look_every_seconds": 0.001,
        "bake_looks": 4,
    }
    return CanaryPlan.model_validate(fields | changes)


def environment_for(service: FakeService) -> dict[str, str]:
    """The environment of a script that uses the fake service and this session's Prefect server."""
    return {
        **os.environ,
        "TUNESHIP_URL": service.url,
        "TUNESHIP_API_KEY": "key",
        "TUNESHIP_CLIENT_ID": "tests",
        "PREFECT_API_URL": PREFECT_API_URL.value() or "",
        "PYTHONPATH": str(SCRIPT.parents[1]),
    }


@pytest.fixture
def script_environment(fake: FakeService) -> dict[str, str]:
    """The environment of every script that this test starts."""
    return environment_for(fake)


class Script:
    """Runs `python flows/shift_traffic.py` against the fake service in a process of its own."""

    def __init__(self, service: FakeService, wanted: CanaryPlan, folder: Path) -> None:
        params, self.result = folder / "plan.json", folder / "result.json"
        params.write_text(json.dumps({"plan": wanted.model_dump(mode="json")}))
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, "--params", params, "--result", self.result],
            env=environment_for(service),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def read_result(self) -> dict[str, Any]:
        """Read the result file."""
        return json.loads(self.result.read_text())


@pytest.fixture
def run(fake: FakeService, tmp_path: Path) -> Iterator[Callable[[CanaryPlan], Script]]:
    """Start scripts, and kill those that still run at the end of the test."""
    started: list[Script] = []

    def start(wanted: CanaryPlan) -> Script:
        folder = tmp_path / f"run-{len(started)}"
        folder.mkdir()
        started.append(Script(fake, wanted, folder))
        return started[-1]

    yield start
    for script in started:
        if script.process.poll() is None:
            script.process.kill()
        script.process.wait()


def slow_plan(**changes: Any) -> CanaryPlan:
    """A plan slow enough to be stopped in the middle: each step takes two seconds or more."""
    fields = {"look_every_seconds": SLOW_ENOUGH_TO_BE_STOPPED, "steps": [5, 50, 100]}
    return plan(**(fields | changes))
