"""`make up` and `make down` work in a new home folder, with real processes on free ports.

When a flow's process dies unnoticed there, its heartbeats stop, the run is marked Crashed, and the guard starts.
"""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from deployments.automations import bring_up_to_date, silent_runs_crash
from deployments.definitions import WORK_POOL
from flows.forms.release_form import EndpointChoice
from flows.release.endpoint_lock import endpoint_lock
from tests.support.prefect.local_machine import ROOT, Machine
from tests.support.prefect.prefect_strangers import assert_strangers_get_nothing
from tests.support.waiting import until
from tuneship.cli.commands.keys import opened, utc_now
from tuneship.client import ApiError
from tuneship.contract.datasets import DatasetUpload
from tuneship.contract.declaring.scopes import PRESETS
from tuneship.contract.webhooks import WebhookCreate
from tuneship.prefect.connection import connect, disconnect
from tuneship.service.access.api_keys import is_in_force
from tuneship.store.database.database import HEAD, SQLITE_FILE

pytestmark = [pytest.mark.slow, pytest.mark.long]
NAMES = {"service", "prefect-server", "bridge", "worker"}
LONG_S = 600.0
ENDPOINT = "waiting"
# The shortest wait that a trigger on a missing event allows; the shipped trigger waits for three heartbeats.
SHORTEST = timedelta(seconds=10)


def test_everything_runs_and_a_second_up_changes_nothing(machine: Machine) -> None:
    before, keys = machine.records, keys_in_force(machine)
    assert set(before) == NAMES
    said = machine.run("up")
    assert machine.records == before
    assert keys_in_force(machine) == keys
    assert machine.prefect.removesuffix("/api") in said
    assert "sign in         with the line in" in said
    with machine.client() as client:
        assert client.models.list().models
        assert len(client.webhooks.list().webhooks) == 1


def test_every_flow_is_registered_with_its_automations_and_credentials(machine: Machine) -> None:
    names = {one["name"] for one in machine.ask("POST", "/deployments/filter", {})}
    assert {"tune-and-deploy", "shift-traffic", "guard"} <= names
    automations = [one["name"] for one in machine.ask("POST", "/automations/filter", {})]
    assert sorted(one for one in automations if one.startswith("tuneship: ")) == [
        "tuneship: a crash starts the guard",
        "tuneship: a silent run has crashed",
    ]
    blocks = machine.ask("POST", "/block_documents/filter", {"include_secrets": False})
    stored = next(one for one in blocks if one["block_type"]["slug"] == "tuneship-credentials")
    assert set(stored["data"]["api_key"]) == {"*"}


@pytest.mark.soak
def test_another_up_keeps_what_people_have_set_and_tells_the_bridge_a_new_secret(
    machine: Machine,
) -> None:
    flow = machine.ask("GET", "/deployments/name/retrain/retrain-on-dataset")
    automations = machine.ask("POST", "/automations/filter", {})
    trigger = next(one for one in automations if one["name"] == "tuneship-dataset-processed")
    path = f"/deployments/{flow['id']}"
    machine.ask("PATCH", path, {"parameters": {"release": {"model_name": "mine"}}})
    machine.ask("PATCH", f"/automations/{trigger['id']}", {"enabled": True})
    pool = f"/work_pools/{WORK_POOL}"
    machine.ask("PATCH", pool, {"is_paused": True, "concurrency_limit": 3})
    (machine.home / ".tuneship" / "webhook.json").unlink()
    before = machine.records

    machine.run("up")

    assert {name for name, one in machine.records.items() if one != before[name]} == {"bridge"}
    automations = machine.ask("POST", "/automations/filter", {})
    (trigger,) = (one for one in automations if one["name"] == trigger["name"])
    machine.ask("PATCH", f"/automations/{trigger['id']}", {"enabled": False})
    kept = machine.ask("GET", path)["parameters"]
    machine.ask("PATCH", path, {"parameters": {}})
    assert (kept, trigger["enabled"]) == ({"release": {"model_name": "mine"}}, True)
    found = machine.ask("GET", pool)
    machine.ask("PATCH", pool, {"is_paused": False, "concurrency_limit": None})
    assert (found["is_paused"], found["concurrency_limit"]) == (True, 3)


def test_an_event_of_the_service_becomes_one_event_of_prefect(machine: Machine) -> None:
    line = b'{"instruction":"a","response":"b"}\n'
    file = machine.home / "rows.jsonl"
    file.write_bytes(line * 2)
    with machine.client() as client, file.open("rb") as content:
        dataset = client.datasets.upload(DatasetUpload(name="d", format="instruction"), content)
    wanted = {"filter": {"event": {"name": ["dataset.processed"]}}}

    def dataset_events() -> list[Any]:
        found = machine.ask("POST", "/events/filter", wanted)["events"]
        return [one for one in found if one["payload"]["id"] == dataset.id]

    until(lambda: len(dataset_events()) == 1, 600)
    assert (
        dataset_events()[0]["resource"]["prefect.resource.id"] == f"tuneship.dataset.{dataset.id}"
    )


def test_a_stranger_gets_nothing_from_the_prefect_server(machine: Machine) -> None:
    assert_strangers_get_nothing(machine.prefect)


def test_the_secrets_of_make_up_are_in_their_files_alone(machine: Machine) -> None:
    password = machine.auth_string.partition(":")[2]
    run_folder = machine.home / ".tuneship" / "run"
    key = json.loads((run_folder / "flows-key").read_text())["api_key"]
    for file in ("prefect-password", "flows-key"):
        assert (run_folder / file).stat().st_mode & 0o777 == 0o600
    for secret in (password, key):
        holding = {
            file.name
            for file in machine.home.rglob("*")
            if file.is_file() and secret.encode() in file.read_bytes()
        }
        assert holding == {"prefect-password" if secret == password else "flows-key"}
    for name, record in machine.records.items():
        process = Path(f"/proc/{record['pid']}")
        assert password.encode() not in (process / "cmdline").read_bytes()
        surroundings = (process / "environ").read_bytes() if name != "service" else b""
        assert b"tsk_" not in surroundings, f"{name} holds a key of the service"
        assert (password.encode() in surroundings) == (name != "service")
    assert password not in machine.run("status")


def test_the_flows_hold_a_key_with_their_scopes_only(machine: Machine) -> None:
    key = key_of_the_flows(machine)
    scopes = keys_in_force(machine)
    assert frozenset(scopes[key[4:12]]) == PRESETS["pipeline"]
    assert not any("models:content" in one for one in scopes.values())


@pytest.mark.soak
def test_lost_secrets_are_replaced_and_the_old_ones_open_nothing(machine: Machine) -> None:
    """As after an upgrade from a version whose server asked for nothing."""
    before, string, key = machine.records, machine.auth_string, key_of_the_flows(machine)
    number = len(keys_in_force(machine))
    for file in ("prefect-password", "flows-key"):
        (machine.home / ".tuneship" / "run" / file).unlink()

    machine.run("up")

    changed = {name for name, one in machine.records.items() if one != before[name]}
    assert changed == {"prefect-server", "bridge", "worker"}
    assert key_of_the_flows(machine) != key
    assert key[4:12] not in keys_in_force(machine)
    assert len(keys_in_force(machine)) == number
    auth = httpx.BasicAuth(*string.split(":", 1))
    refused = httpx.get(f"{machine.prefect}/version", auth=auth, trust_env=False, timeout=120)
    assert refused.status_code == 401


def test_an_up_beside_a_service_of_an_earlier_version_ends_nothing(machine: Machine) -> None:
    before = machine.records
    set_schema(machine, "0000")
    try:
        with moved(machine, "prefect-password"):
            said = machine.run("up", 1)
    finally:
        set_schema(machine, HEAD)
    assert machine.records == before
    assert "run `make down`, then `make up`" in said


def test_an_up_without_the_settings_of_a_service_started_elsewhere_ends_nothing(
    machine: Machine,
) -> None:
    before, own = machine.records, {"TUNESHIP_MASTER_KEY_FILE": "/dev/null"}
    with moved(machine, "prefect-password"), moved(machine, "service.json"):
        said = replace(machine, environment=machine.environment | own).run("up", 1)
    assert machine.records == before
    assert "with its version and settings (TUNESHIP_DATABASE_URL" in said


@contextmanager
def moved(machine: Machine, name: str) -> Iterator[None]:
    """Take a file out of the run folder for a while."""
    file = machine.home / ".tuneship" / "run" / name
    aside = file.rename(machine.home / name)
    try:
        yield
    finally:
        aside.rename(file)


def set_schema(machine: Machine, schema: str) -> None:
    """Name another schema in the service's database, which stays as it is."""
    with closing(sqlite3.connect(machine.home / ".tuneship" / "data" / SQLITE_FILE)) as database:
        database.execute("update alembic_version set version_num = ?", [schema])
        database.commit()


def test_a_string_that_was_changed_while_the_server_runs_is_reported_and_ends_nothing(
    machine: Machine,
) -> None:
    before, string = machine.records, machine.auth_string
    file = machine.home / ".tuneship" / "run" / "prefect-password"
    try:
        file.write_text("somebody:else\n")
        said = machine.run("up", 1)
    finally:
        file.write_text(f"{string}\n")
    assert machine.records == before
    assert f"another string than the one in {file}: run `make down`, then `make up`" in said
    assert "somebody" not in said


def key_of_the_flows(machine: Machine) -> str:
    """The key in Prefect's block."""
    blocks = machine.ask("POST", "/block_documents/filter", {"include_secrets": True})
    (held,) = (one for one in blocks if one["block_type"]["slug"] == "tuneship-credentials")
    return held["data"]["api_key"]


def keys_in_force(machine: Machine) -> dict[str, list[str]]:
    """Scopes of the service's keys, by id."""
    with opened(machine.home / ".tuneship" / "data") as keys:
        return {row["id"]: row["scopes"] for row in keys.listed() if is_in_force(row, utc_now())}


def test_a_tenants_webhook_does_not_reach_the_prefect_server(machine: Machine) -> None:
    with machine.client() as client, pytest.raises(ApiError) as refused:
        client.webhooks.create(WebhookCreate(url=f"{machine.prefect}/admin/version", events=["*"]))
    assert refused.value.status == 422


def test_the_bridge_passes_nothing_on_that_the_service_did_not_sign(machine: Machine) -> None:
    port = machine.environment["TUNESHIP_BRIDGE_PORT"]
    forged = {"type": "dataset.processed", "id": "evt_forged", "data": {"object": "d", "id": "x"}}
    answer = httpx.post(f"http://127.0.0.1:{port}/", json=forged, trust_env=False, timeout=120)
    assert answer.status_code == 400


def test_the_worker_runs_the_guard(machine: Machine) -> None:
    guard = machine.ask("GET", "/deployments/name/guard/guard")
    started = {"state": {"type": "SCHEDULED"}}
    run = machine.ask("POST", f"/deployments/{guard['id']}/create_flow_run", started)

    def state() -> str:
        return str(machine.ask("GET", f"/flow_runs/{run['id']}")["state"]["type"])

    until(lambda: state() in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"), 600)
    assert state() == "COMPLETED"


def test_schedules_make_runs(machine: Machine) -> None:
    """Runs are really scheduled: Prefect's scheduler fails silently with an incompatible database library."""
    wanted = {
        "deployments": {"name": {"any_": ["guard"]}},
        "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
    }
    until(lambda: bool(machine.ask("POST", "/flow_runs/filter", wanted)), 600)


@pytest.fixture
def waiting_script(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a release script that only waits, because this process holds the lock of its endpoint."""
    home = machine.home / ".tuneship"
    monkeypatch.setenv("TUNESHIP_RECORDS", str(home / "records"))
    monkeypatch.setenv("TUNESHIP_DATA_DIR", str(home / "data"))
    params = machine.home / "waiting.json"
    release = {"model_name": "m", "model": "tuneship-tiny", "endpoint": {"name": ENDPOINT}}
    params.write_text(json.dumps(release))
    with machine.client() as client:
        settings = client.settings
    own = {
        "TUNESHIP_URL": settings.url,
        "TUNESHIP_API_KEY": settings.api_key.get_secret_value(),
        "TUNESHIP_CLIENT_ID": settings.client_id,
        "PREFECT_API_URL": machine.prefect,
        "PREFECT_API_AUTH_STRING": machine.auth_string,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PYTHONPATH": str(ROOT),
    }
    script = [sys.executable, str(ROOT / "flows" / "tune_and_deploy.py"), "--params", str(params)]
    connect(settings)
    with (
        temporary_settings(
            {PREFECT_API_URL: machine.prefect, PREFECT_API_AUTH_STRING: machine.auth_string}
        ),
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


def test_runs_whose_processes_ended_with_the_worker_are_marked_crashed(machine: Machine) -> None:
    worker = machine.records["worker"]["pid"]
    os.kill(worker, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{worker}/cmdline").exists() or is_zombie(worker), LONG_S)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    flow = machine.ask("GET", "/deployments/name/guard/guard")
    states: dict[str, str] = {}
    for name, kind, pid in (
        ("left", "RUNNING", ended.pid),
        ("taken", "PENDING", None),
        ("alive", "RUNNING", os.getpid()),
    ):
        run = machine.ask("POST", f"/deployments/{flow['id']}/create_flow_run", {})["id"]
        if pid is not None:
            machine.ask("PATCH", f"/flow_runs/{run}", {"infrastructure_pid": str(pid)})
        state = {"state": {"type": kind}, "force": True}
        machine.ask("POST", f"/flow_runs/{run}/set_state", state)
        states[name] = run

    said = machine.run("up")

    found = {name: machine.ask("GET", f"/flow_runs/{run}") for name, run in states.items()}
    assert "its process ended with the worker" in said
    assert {name: one["state_type"] for name, one in found.items()} == {
        "left": "CRASHED",
        "taken": "CRASHED",
        "alive": "RUNNING",
    }
    machine.ask("DELETE", f"/flow_runs/{states['alive']}")


def is_zombie(pid: int) -> bool:
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


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
