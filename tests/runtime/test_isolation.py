"""A worker has no network, whatever it tries; and the same attempts succeed without the filter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until
from tuneship.runtime import intrusion, isolation
from tuneship.runtime.isolation import MACHINES, CannotIsolate
from tuneship.runtime.processes import Processes
from tuneship.runtime.workers import WorkerSpec

ATTEMPTS = {
    "tcp", "tcp6", "udp", "unix", "abstract unix", "netlink", "packet", "raw", "listen", "io_uring",
    "ptrace", "memory of another", "descriptor of another", "keys", "bpf", "child",
}  # fmt: skip
ORDINARY = {"tcp", "udp", "unix", "abstract unix", "netlink", "listen", "child"}
"""What every process may do where nobody forbids it; the others depend on the host."""
PATIENCE_S = 600


def tried(*arguments: str) -> dict[str, bool]:
    done = subprocess.run(
        [sys.executable, "-m", "tuneship.runtime.intrusion", *arguments],
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return json.loads(done.stdout)


def test_nothing_that_an_isolated_process_tries_succeeds() -> None:
    found = tried()
    assert set(found) == ATTEMPTS
    assert not [name for name, succeeded in found.items() if succeeded]


def test_the_attempts_succeed_without_the_filter() -> None:
    found = tried("--open")
    assert set(found) == ATTEMPTS
    assert all(found[name] for name in ORDINARY)


@pytest.mark.parametrize(("needs_network", "reached"), [(False, "no"), (True, "yes")])
def test_workers_are_started_without_network_unless_they_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_network: bool, reached: str
) -> None:
    (tmp_path / "opens_a_socket.py").write_text(
        "import socket\ntry:\n    socket.socket()\n    print('yes')\nexcept PermissionError:\n    print('no')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "log"
    spec = WorkerSpec("opens_a_socket", (), log, needs_network=needs_network)
    worker = Processes(isolated=True).start(spec)
    until(lambda: worker.exit_code() is not None)
    assert log.read_text().split() == [reached]


def test_a_workers_own_further_process_is_hidden_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new program would be open to the looks of others again; the filter it has from its parent."""
    (tmp_path / "is_hidden.py").write_text(
        "import ctypes\nprint(ctypes.CDLL(None).prctl(3))  # PR_GET_DUMPABLE\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launch = [sys.executable, "-m", "tuneship.runtime.launch", str(os.getpid())]
    said = [
        subprocess.check_output([*launch, network, "is_hidden"], timeout=PATIENCE_S)
        for network in ("inherited", "open")
    ]
    assert said == [b"0\n", b"1\n"]


def test_both_processors_refuse_the_same_calls() -> None:
    first, second = (machine.refused for machine in MACHINES.values())
    assert set(first) == set(second)
    for machine in MACHINES.values():
        assert len(set(machine.refused.values())) == len(machine.refused)
        assert len(isolation._instructions(machine)) == 8 * (len(machine.refused) + 6)
    assert set(MACHINES) == set(intrusion.CALLS)


def test_a_host_without_a_filter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "m68k")
    with pytest.raises(CannotIsolate, match="m68k"):
        isolation.isolate()
