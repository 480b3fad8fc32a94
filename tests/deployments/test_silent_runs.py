"""When a flow's process dies unnoticed, its heartbeats stop, the run is marked Crashed, and the guard starts."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.automations import bring_up_to_date, silent_runs_crash
from flows.forms.release_form import EndpointChoice
from flows.release.endpoint_lock import endpoint_lock
from tasks.api import connect, disconnect
from tests.support.local_machine import ROOT, Machine
from tests.support.waiting import until

pytestmark = pytest.mark.slow
LONG_S = 600.0
ENDPOINT = "waiting"
SHORTEST = timedelta(seconds=10)
"""The shortest wait that a trigger on a missing event allows; the shipped trigger waits for three heartbeats."""


@pytest.fixture
def waiting_script(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a release script that only waits, because this process holds the lock of its endpoint."""
    home = machine.home / ".tuneship"
    monkeypatch.setenv("TUNESHIP_RECORDS", str(home / "records"))
    monkeypatch.setenv("TUNESHIP_DATA_DIR", str(home / "data"))
    params = machine.home / "waiting.json"
    release = {"model_name": "m", "model": "ft:b:m:0123456789", "endpoint": {"name": ENDPOINT}}
    params.write_text(json.dumps(release))
    with machine.client() as client:
        settings = client.settings
    own = {
        "TUNESHIP_URL": settings.url,
        "TUNESHIP_API_KEY": settings.api_key.get_secret_value(),
        "TUNESHIP_CLIENT_ID": settings.client_id,
        "PREFECT_API_URL": machine.prefect,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PYTHONPATH": str(ROOT),
    }
    script = [sys.executable, str(ROOT / "flows" / "tune_and_deploy.py"), "--params", str(params)]
    connect(settings)
    with (
        temporary_settings({PREFECT_API_URL: machine.prefect}),
        (machine.home / "waiting.log").open("wb") as said,
        endpoint_lock(EndpointChoice(name=ENDPOINT)),
    ):
        process = subprocess.Popen(script, env=machine.environment | own, stdout=said, stderr=said)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            disconnect()


def runs(machine: Machine, flow: str) -> list[dict[str, Any]]:
    return machine.ask("POST", "/flow_runs/filter", {"flows": {"name": {"any_": [flow]}}})


def resource(run: dict[str, Any]) -> str:
    return f"prefect.flow-run.{run['id']}"


def release_runs(machine: Machine) -> dict[str, dict[str, Any]]:
    """Runs of `tune-and-deploy` on this test's endpoint, by resource id."""
    found = runs(machine, "tune-and-deploy")
    names = [one["parameters"]["release"]["endpoint"]["name"] for one in found]
    return {resource(one): one for one, name in zip(found, names, strict=True) if name == ENDPOINT}


def with_heartbeat(machine: Machine) -> set[str]:
    """Ids of the resources that have sent a heartbeat."""
    wanted = {"filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}}}
    events = machine.ask("POST", "/events/filter", wanted)["events"]
    return {one["resource"]["prefect.resource.id"] for one in events}


def test_a_run_that_falls_silent_is_marked_crashed_and_the_guard_starts(
    machine: Machine, waiting_script: "subprocess.Popen[bytes]"
) -> None:
    bring_up_to_date(silent_runs_crash(SHORTEST))
    try:
        until(lambda: bool(with_heartbeat(machine) & set(release_runs(machine))), LONG_S)
        waiting_script.send_signal(signal.SIGKILL)
        # The automation waits for 10 s here, less than the 30 s between heartbeats, so on a slow machine it may
        # already have marked the run.
        (run,) = with_heartbeat(machine) & set(release_runs(machine))
        until(lambda: release_runs(machine)[run]["state_type"] != "RUNNING", LONG_S)
        ended = release_runs(machine)[run]
        assert (ended["state_type"], ended["state"]["message"]) == ("CRASHED", "no heartbeat")
    finally:
        bring_up_to_date(silent_runs_crash())

    def guards() -> list[str]:
        found = [one for one in runs(machine, "guard") if one["created_by"]]
        return [one["state_type"] for one in found if one["created_by"]["type"] == "AUTOMATION"]

    until(lambda: "COMPLETED" in guards(), LONG_S)
