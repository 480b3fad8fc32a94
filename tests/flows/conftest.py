"""What flow tests share: a Prefect server for the session, a fake service, records of their own, a plan in looks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Before Prefect reads its settings; without them SQLite answers 503 and the client sleeps for seconds.
os.environ |= {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}

from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.testing.utilities import prefect_test_harness

from tasks.api import connect, disconnect
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, FakeService
from tests.support.fakes.whole_service import WholeService
from tests.support.waiting import until
from tuneship.gates.plan import CanaryPlan
from tuneship.settings import ClientSettings

PATIENCE_S = 300.0
SCRIPT = Path(__file__).parents[2] / "flows" / "shift_traffic.py"
SLOW_ENOUGH_TO_BE_STOPPED = 0.5
STANDS_STILL = 60.0
"""Between two looks: nothing happens any more while a test looks at a rollout."""


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[None]:
    """One Prefect server for all flow tests; no heartbeats (a second a flow), no log rows."""
    with (
        prefect_test_harness(server_startup_timeout=300),
        temporary_settings(
            {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_LOGGING_TO_API_ENABLED: False}
        ),
    ):
        yield


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's rollouts keep their records."""
    monkeypatch.setenv("TUNESHIP_RECORDS", str(tmp_path / "records"))
    return tmp_path / "records"


def use(service: FakeService) -> None:
    """Let every task talk to this service."""
    connect(ClientSettings(url=service.url, api_key="key", client_id="tests"))


@contextmanager
def in_use(
    service: WholeService, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WholeService]:
    """The flows' service, until the end of the test; their reports go into a folder of it."""
    monkeypatch.setenv("TUNESHIP_REPORTS", str(reports))
    with service as made:
        use(made)
        yield made
    disconnect()


@pytest.fixture
def service(
    prefect_api: None, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WholeService]:
    """What a whole chain needs: data, jobs, deployments, an endpoint."""
    with in_use(WholeService(), tmp_path / "reports", monkeypatch) as made:
        yield made


@pytest.fixture
def fake(prefect_api: None, records: Path) -> Iterator[FakeService]:
    """A fake service in use; a test scripts it before it starts the flow."""
    with FakeService() as service:
        use(service)
        yield service
    disconnect()


def wait_for(happened: Callable[[], bool]) -> None:
    """Poll, bounded."""
    until(happened, PATIENCE_S)


def plan(**changes: Any) -> CanaryPlan:
    """The default plan on an endpoint to be created, with looks as fast as they go and a short bake."""
    fields: dict[str, Any] = {
        "endpoint_name": "shop",
        "baseline_deployment_id": BASELINE,
        "candidate_deployment_id": CANDIDATE,
        "look_every_seconds": 0.001,
        "bake_looks": 4,
    }
    return CanaryPlan.model_validate(fields | changes)


def environment_for(service: FakeService) -> dict[str, str]:
    """Of a script that works with the fake and with this session's Prefect server."""
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
    """The environment of any script of this test."""
    return environment_for(fake)


class Script:
    """`python flows/shift_traffic.py` in a process of its own, against the fake."""

    def __init__(self, service: FakeService, wanted: CanaryPlan, folder: Path) -> None:
        params, self.result = folder / "plan.json", folder / "result.json"
        params.write_text(json.dumps({"plan": wanted.model_dump(mode="json")}))
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, "--params", params, "--result", self.result],
            env=environment_for(service),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def told(self) -> dict[str, Any]:
        """The result file."""
        return json.loads(self.result.read_text())


@pytest.fixture
def run(fake: FakeService, tmp_path: Path) -> Iterator[Callable[[CanaryPlan], Script]]:
    """Start scripts; none outlives its test."""
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
    """A plan that can be stopped in its middle: steps of two seconds and more."""
    fields = {"look_every_seconds": SLOW_ENOUGH_TO_BE_STOPPED, "steps": [5, 50, 100]}
    return plan(**(fields | changes))
