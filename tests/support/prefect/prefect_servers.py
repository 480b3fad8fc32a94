"""Prefect servers that start with all their tables: a new one needs eleven seconds of processor time to make them."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from flows.script.local_processes import PREFECT_SERVER, prefect_server

PrefectHomes = Callable[[Path], Path]
DATABASE = "prefect.db"
# The environment of servers and programs that take no setting from whoever runs the tests.
WITHOUT_SETTINGS = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PREFECT_", "TUNESHIP_"))
}

# Set before Prefect reads its settings; without them SQLite answers 503 and the client sleeps for seconds.
os.environ |= {**PREFECT_SERVER, "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1"}


@pytest.fixture(scope="session")
def prefect_homes(tmp_path_factory: pytest.TempPathFactory) -> PrefectHomes:
    """A function that makes a home folder for a server. All test processes of a run copy the same database."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    first = shared / "prefect-home"
    with (shared / "prefect-home.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not first.exists():
            made = own / "prefect-home-in-the-making"
            with prefect_server(
                {**WITHOUT_SETTINGS, "PREFECT_HOME": str(made)}, own / "prefect.log"
            ):
                pass  # it answers once it has its tables
            made.rename(first)

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True)
        for file in first.glob(f"{DATABASE}*"):
            shutil.copyfile(file, folder / file.name)
        return folder

    return make


@pytest.fixture(scope="session")
def prefect_api(
    tmp_path_factory: pytest.TempPathFactory, prefect_homes: PrefectHomes
) -> Iterator[None]:
    """Start one Prefect server for all flows of this process, without heartbeats (a second a flow) and log rows."""
    from prefect.events.clients import PrefectEventsClient
    from prefect.events.worker import EventsWorker
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_LOGGING_TO_API_ENABLED,
        temporary_settings,
    )
    from prefect.testing.utilities import prefect_test_harness

    home = prefect_homes(tmp_path_factory.mktemp("prefect") / "home")
    for file in home.iterdir():  # the harness looks for this name
        file.rename(file.with_name(file.name.replace(DATABASE, "prefect-test.db")))
    with (
        patch("prefect.testing.utilities.mkdtemp", lambda: str(home)),
        prefect_test_harness(server_startup_timeout=300),
        temporary_settings(
            {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_LOGGING_TO_API_ENABLED: False}
        ),
    ):
        # Prefect keeps one sender of events for each process, bound to the server of its first event. Tests of other
        # folders may have used a server that is gone.
        EventsWorker.set_client_override(PrefectEventsClient, api_url=PREFECT_API_URL.value())
        yield
        EventsWorker.set_client_override(None)
