"""Fixtures: new services for tests that change much, and shared ones for tests that only read or are refused."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BOTH
from tests.support.databases.installations import Postgres, Sqlite
from tests.support.service.in_process import Service
from tests.support.service.tenants import Tenants, two_tenants
from tests.support.service.world import World

DatabaseSettings = Callable[[], dict[str, Any]]


@pytest.fixture(scope="session")
def shared(
    tmp_path_factory: pytest.TempPathFactory, database_settings: DatabaseSettings
) -> Iterator[Service]:
    options: dict[str, Any] = {"allow_fault_injection": True, **database_settings()}
    with Service(tmp_path_factory.mktemp("shared"), **options) as service:
        yield service


@pytest.fixture
def start(tmp_path: Path, database_settings: DatabaseSettings) -> Iterator[Callable[..., Service]]:
    """Return a function that starts a service with settings, e.g. `start(maximum_deployments=1)`."""
    numbers = count()
    with ExitStack() as opened:
        yield lambda **settings: opened.enter_context(
            Service(tmp_path / f"data-{next(numbers)}", **database_settings(), **settings)
        )


@pytest.fixture
def service(start: Callable[..., Service]) -> Service:
    options: dict[str, Any] = {"allow_fault_injection": True}
    return start(**options)


@pytest.fixture(scope="session")
def world(
    tmp_path_factory: pytest.TempPathFactory, database_settings: DatabaseSettings
) -> Iterator[World]:
    options: dict[str, Any] = {"allow_fault_injection": True, **database_settings()}
    service = Service(tmp_path_factory.mktemp("world"), **options)
    made = World(service)
    yield made
    service.__exit__()


@pytest.fixture(scope="session")
def tenants(world: World) -> Tenants:
    return two_tenants(world)


@pytest.fixture(params=BOTH)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Sqlite | Postgres:
    """A database outside the data directory, which an operator may copy, restore, delete or rename."""
    if request.param == "sqlite":
        return Sqlite(tmp_path / "elsewhere.sqlite")
    return Postgres(request.getfixturevalue("postgres"))
