"""Tests of the check at each start: it finds every way that is open, and none in an isolated worker."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tuneship.isolation.landlock import Places
from tuneship.isolation.self_check import open_ways
from tuneship.processes.worker_processes import last_line

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing isolates")

ALL_WAYS = {
    "TCP", "UDP", "Unix socket", "datagram to a Unix socket", "passing a descriptor", "reading key", "listing data",
    "reading another's file", "writing another's file", "writing into this program", "memory of the service",
    "tracing the service", "signal to the service", "mount", "new user namespace",
}  # fmt: skip
# Where the host allows them to nobody but root, or to nobody.
NOT_EVERYWHERE = {
    "writing into this program", "memory of the service", "tracing the service", "mount", "new user namespace",
}  # fmt: skip


def found(run: Callable[[str, str], str], data: Path) -> list[str]:
    """The open ways to a data directory and this process."""
    (data / "scratch").mkdir(parents=True)
    (data / "key").write_text("secret")
    ways = open_ways(
        run,
        data / "scratch",
        processes={"the service": os.getpid()},
        secrets=[data / "key"],
        folders=[data],
    )
    assert list((data / "scratch").iterdir()) == []
    return ways


def test_every_way_is_open_without_isolation_where_the_host_allows_it(tmp_path: Path) -> None:
    def run(module: str, argument: str) -> str:
        command = [sys.executable, "-m", module, argument]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    ways = found(run, tmp_path / "data")
    assert set(ways) <= ALL_WAYS
    assert ALL_WAYS - set(ways) <= NOT_EVERYWHERE


def test_no_way_is_open_in_an_isolated_worker(tmp_path: Path) -> None:
    assert found(partial(last_line, places=Places()), tmp_path / "data") == []


def test_a_check_that_fails_is_no_check_that_passes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No module named"):
        last_line("tuneship.no_such_module", "", Places())
