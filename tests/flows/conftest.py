"""What flow tests share: a Prefect server for the session, a fake service, records of their own, a plan in looks."""

import os
import time
from collections.abc import Callable, Iterator
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
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}

from prefect.settings import (
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.testing.utilities import prefect_test_harness

from tasks.api import connect, disconnect
from tests.fakes.canary_service import BASELINE, CANDIDATE, FakeService
from tuneship.gates.plan import CanaryPlan
from tuneship.settings import ClientSettings

PATIENCE_S = 60.0


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[None]:
    """One Prefect server for all flow tests; no heartbeats (a second a flow), no log rows."""
    with (
        prefect_test_harness(server_startup_timeout=90),
        temporary_settings(
            {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_LOGGING_TO_API_ENABLED: False}
        ),
    ):
        yield


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's roll-outs keep their records."""
    monkeypatch.setenv("TUNESHIP_RECORDS", str(tmp_path / "records"))
    return tmp_path / "records"


def use(service: FakeService) -> None:
    """Let every task talk to this service."""
    connect(
        ClientSettings(url=service.url, api_key="key", client_id="tests", connect_timeout_s=2.0)
    )


@pytest.fixture
def fake(prefect_api: None, records: Path) -> Iterator[FakeService]:
    """A fake service in use; a test scripts it before it starts the flow."""
    with FakeService() as service:
        use(service)
        yield service
    disconnect()


def wait_for(happened: Callable[[], bool]) -> None:
    """Poll, bounded."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen")
        time.sleep(0.01)


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
