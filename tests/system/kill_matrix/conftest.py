"""Fixtures of the kill matrix: a killable Prefect server, a service with simulated workers, and a killable service."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_HOME,
    PREFECT_LOCAL_STORAGE_PATH,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from pydantic import SecretStr

from tests.support.prefect.prefect_servers import PrefectHomes
from tests.support.service.in_process import Service
from tests.support.service.processes import Serve
from tests.support.waiting import free_port
from tests.system.kill_matrix.gate import HoldingProxy
from tests.system.kill_matrix.place import Release, ServiceSetup, TrainingPlayer
from tests.system.kill_matrix.prefect_place import PrefectServer
from tuneship.client import Client
from tuneship.prefect.connection import connect, disconnect
from tuneship.settings import ClientSettings


@pytest.fixture(scope="module")
def prefect(
    tmp_path_factory: pytest.TempPathFactory, prefect_homes: PrefectHomes
) -> Iterator[PrefectServer]:
    """Start a second Prefect server, because the one of the test harness cannot be restarted.

    It ends with the file's tests, since an idle one uses the processor, too.
    """
    server = PrefectServer(prefect_homes(tmp_path_factory.mktemp("prefect") / "home"))
    own = {
        PREFECT_API_URL: server.url,
        PREFECT_API_AUTH_STRING: server.auth_string,
        PREFECT_HOME: server.home,
        # A later run finds the results of a killed one here.
        PREFECT_LOCAL_STORAGE_PATH: server.home / "storage",
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        PREFECT_LOGGING_TO_API_ENABLED: False,
    }
    try:
        with temporary_settings(own):
            yield server
    finally:
        server.kill()


def environment_of(settings: ClientSettings, prefect: PrefectServer) -> dict[str, str]:
    """Return the environment variables of scripts and workers."""
    return prefect.environment | {
        "TUNESHIP_URL": settings.url,
        "TUNESHIP_API_KEY": settings.api_key.get_secret_value(),
        "TUNESHIP_CLIENT_ID": settings.client_id,
    }


@contextmanager
def setup_for(direct: ClientSettings, prefect: PrefectServer) -> Iterator[ServiceSetup]:
    """Put a holding proxy in front of the service at the address of `direct`."""
    with HoldingProxy(int(direct.url.rpartition(":")[2])) as proxy, Client(direct) as client:
        settings = direct.model_copy(update={"url": proxy.url})
        yield ServiceSetup(proxy, settings, client, environment_of(settings, prefect), prefect)


@pytest.fixture(scope="module")
def simulated(
    tmp_path_factory: pytest.TempPathFactory, prefect: PrefectServer
) -> Iterator[ServiceSetup]:
    """Run the real service on sockets, with simulated trainings and models."""
    folder = tmp_path_factory.mktemp("played")
    room = {"maximum_active_jobs": 1000, "maximum_deployments": 1000}
    with Service(folder / "data", **room) as service:
        # The smoke test compares latencies; this pause makes them alike on any machine.
        service.engines.base_model_pause_s = 0.1
        service.listen()
        key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        direct = ClientSettings(url=service.url, api_key=SecretStr(key), client_id="alice")
        with (
            setup_for(direct, prefect) as setup,
            TrainingPlayer(service.engines, setup.may_train),
        ):
            yield setup


@pytest.fixture(scope="module")
def real(
    tmp_path_factory: pytest.TempPathFactory, prefect: PrefectServer
) -> Iterator[ServiceSetup]:
    """Run `tuneship serve` with its real workers, always on the same port."""
    folder = tmp_path_factory.mktemp("real")
    serve = Serve(folder / "data", "--port", str(free_port()))
    try:
        direct = ClientSettings.from_credentials(folder / "data" / "credentials.json")
        with setup_for(direct, prefect) as setup:
            yield replace(setup, serve=serve)
    finally:
        serve.stop()


@pytest.fixture
def release(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Release]:
    """Create a release for this test alone; requests of the test process go through the proxy, too."""
    is_real = request.node.callspec.params["victim"].startswith("service")
    setup: ServiceSetup = request.getfixturevalue("real" if is_real else "simulated")
    made = Release(setup, tmp_path, f"release-{uuid4().hex[:8]}")
    for name in ("TUNESHIP_RECORDS", "TUNESHIP_REPORTS"):
        monkeypatch.setenv(name, made.environment[name])
    connect(setup.settings)
    setup.may_train.set()
    yield made
    setup.proxy.heal()
    disconnect()
