"""Both ways to start real workers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tuneship.processes.forked_workers import ForkedProcesses
from tuneship.processes.worker_processes import LocalProcesses
from tuneship.processes.worker_protocol import Runtime


@pytest.fixture(params=["started", "forked"])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[bool], Runtime]]:
    """Make what starts workers, isolated or not."""
    with ExitStack() as undo:

        def make(isolated: bool = True) -> Runtime:
            if request.param == "started":
                return LocalProcesses(isolated=isolated)
            log, libraries = tmp_path / "server.log", {"worker_of_test": ("json",)}
            forked = ForkedProcesses(isolated=isolated, log=log, libraries=libraries)
            return undo.enter_context(closing(forked))

        yield make
