"""Configuration of all tests: which database they run on, and how Hypothesis generates examples.

A test file with `pytestmark = pytest.mark.both_databases` runs on SQLite and on Postgres, provided its fixtures use
`database_settings`; all other files run on SQLite. On Postgres it is `slow`, unless it is a unit test, and left to
`make soak` with `both_databases(postgres="soak")`. Examples have no time limit, because machines differ, and leave no
files in the checkout. Every run generates the same examples, so a failure comes from the change under test; `make soak`
generates new ones.
"""

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.databases.postgres_cluster import postgres
from tests.support.objects.object_server import bucket, object_server
from tests.support.prefect.local_machine import machine
from tests.support.prefect.prefect_servers import prefect_api, prefect_homes

__all__ = ["bucket", "machine", "object_server", "postgres", "prefect_api", "prefect_homes"]

settings.register_profile(
    "tuneship",
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
settings.register_profile("soak", settings.get_profile("tuneship"), derandomize=False)
settings.load_profile("tuneship")

os.environ.setdefault(
    "TUNESHIP_PRELOAD_TRAINING", "false"
)  # it costs every service seconds at start; two tests turn it on

# A shell that starts `make test` in the background makes it ignore Ctrl-C, and so would the commands of tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


BOTH = ("sqlite", pytest.param("postgres", marks=pytest.mark.postgres))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    asks = "database_settings" in metafunc.fixturenames
    wanted = metafunc.definition.get_closest_marker("both_databases")
    if not asks or wanted is None:
        return
    marks = [pytest.mark.postgres]
    # `make test-all` repeats on Postgres what `make test` runs on SQLite, but for the tests of the store itself.
    if "unit" not in metafunc.definition.path.parts:
        marks.append(pytest.mark.slow)
    if wanted.kwargs.get("postgres") == "soak":
        marks.append(pytest.mark.soak)
    both = ("sqlite", pytest.param("postgres", marks=marks))
    metafunc.parametrize("database_settings", both, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, so that no process works alone at the end: those with a long test first, then by their size."""
    counts = Counter(item.path for item in items)
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: (item.path not in long, -counts[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all test files, and make cheap what every test would pay for then."""
    # Almost nothing of this is ever garbage, and a full collection takes a second to find that out.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # The threads of several test processes on two cores wait for each other more than they compute.
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)


@pytest.fixture(scope="session")
def database_settings(request: pytest.FixtureRequest) -> Callable[[], dict[str, Any]]:
    """Return a function that makes a new database and returns its setting (no setting for SQLite)."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return dict
    cluster = request.getfixturevalue("postgres")
    return lambda: {"database_url": cluster.new_database()}


@pytest.fixture(autouse=True)
def _temporary_files_have_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore `tempfile.tempdir` after each test: a service that runs in this process changes it."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)


@pytest.fixture(autouse=True)
def _databases_are_used_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give a test's Postgres databases back for reuse; as it is set up first, it does so after the test's fixtures."""
    if request.node.get_closest_marker("postgres") is None:
        yield
        return
    cluster = request.getfixturevalue("postgres")
    lent = len(cluster.lent)
    yield
    cluster.take_back(lent)
