"""A group of replicas whose processes the tests play, and both runtimes that start real ones."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.engines import PlayedEngines
from tuneship.runtime.forked_workers import ForkedProcesses
from tuneship.runtime.replica_set import ReplicaSet, replica_process
from tuneship.runtime.worker_processes import LocalProcesses
from tuneship.runtime.worker_protocol import Runtime

# Modules that the tests run as workers, without libraries that are loaded before.
FORKED = ("worker_of_test", "sleeper", "intruder", "tuneship.runtime.intrusion")


@pytest.fixture
def engines() -> PlayedEngines:
    return PlayedEngines([5, 6])


@pytest.fixture
def group(engines: PlayedEngines, tmp_path: Path) -> ReplicaSet:
    return ReplicaSet(replica_process(engines), tmp_path / "base", tmp_path / "replica.log")


@pytest.fixture(params=["started", "forked"])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[bool], Runtime]]:
    """Make what starts workers, isolated or not."""
    with ExitStack() as undo:

        def make(isolated: bool = True) -> Runtime:
            if request.param == "started":
                return LocalProcesses(isolated=isolated)
            log, libraries = tmp_path / "server.log", dict.fromkeys(FORKED, ("json",))
            forked = ForkedProcesses(isolated=isolated, log=log, libraries=libraries)
            return undo.enter_context(closing(forked))

        yield make
