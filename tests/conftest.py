"""What all tests share: which database they run on, and how generated examples are made.

A test file that says `pytestmark = pytest.mark.both_databases` runs on SQLite and on Postgres, where its fixtures
come to rest on `database_settings`; all others run on SQLite. Examples are not timed (machines differ), and leave no
files in the checkout. They are the same in every run, so that a change is judged by what it did; `make soak` draws
others.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.local_machine import machine
from tests.support.object_server import bucket, object_server
from tests.support.postgres_cluster import postgres

__all__ = ["bucket", "machine", "object_server", "postgres"]

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
    "TUNESHIP_WARM_TRAINER", "false"
)  # seconds of work for each service; two tests turn it on

BOTH = ("sqlite", pytest.param("postgres", marks=pytest.mark.postgres))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    asks = "database_settings" in metafunc.fixturenames
    if asks and metafunc.definition.get_closest_marker("both_databases"):
        metafunc.parametrize("database_settings", BOTH, indirect=True, scope="session")


@pytest.fixture(scope="session")
def database_settings(request: pytest.FixtureRequest) -> Callable[[], dict[str, Any]]:
    """Makes the setting that gives a service a database of its own; nothing for SQLite in its data folder."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return dict
    cluster = request.getfixturevalue("postgres")
    return lambda: {"database_url": cluster.new_database()}


@pytest.fixture(autouse=True)
def _temporary_files_have_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that a test starts in this process moves it, into a folder that no other user can enter."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)


@pytest.fixture(autouse=True)
def _databases_are_used_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """It is set up before, and so ended after, what a test has of its own."""
    if request.node.get_closest_marker("postgres") is None:
        yield
        return
    cluster = request.getfixturevalue("postgres")
    lent = len(cluster.lent)
    yield
    cluster.take_back(lent)
