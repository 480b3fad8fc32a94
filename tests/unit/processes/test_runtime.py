"""Workers as processes: they see a small environment, die with their parent, and are ended with their children."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.waiting import is_alive, until
from tuneship.isolation.landlock import Places
from tuneship.processes.worker_protocol import Runtime, WorkerSpec

ROOT = Path(__file__).parents[3]
MakeRuntime = Callable[..., Runtime]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Make a worker's module from its text, on the path of workers."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")

    def make(text: str) -> str:
        (tmp_path / "worker_of_test.py").write_text(text)
        return "worker_of_test"

    return make


def test_a_worker_runs_with_its_arguments_and_a_small_environment(
    tmp_path: Path,
    module: Callable[[str], str],
    runtime: MakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUNESHIP_DATABASE_URL", "postgresql://secret")
    name = module("import os, sys\nprint(sys.argv[1:], *sorted(os.environ))")
    log = tmp_path / "log"
    worker = runtime().start(WorkerSpec(name, ("a", "b"), log, threads=1))
    until(lambda: worker.exit_code() is not None)
    assert worker.exit_code() == 0
    text = log.read_text()
    assert text.startswith("['a', 'b']")
    assert "OMP_NUM_THREADS" in text
    assert "TRANSFORMERS_OFFLINE" in text
    assert "DATABASE" not in text


def test_a_worker_leaves_no_core_file(
    tmp_path: Path, module: Callable[[str], str], runtime: MakeRuntime
) -> None:
    name = module("import resource\nprint(resource.getrlimit(resource.RLIMIT_CORE))")
    for isolated in (True, False):
        log = tmp_path / f"log-{isolated}"
        worker = runtime(isolated).start(WorkerSpec(name, (), log))
        until(lambda worker=worker: worker.exit_code() is not None)
        assert log.read_text() == "(0, 0)\n"


def test_killing_a_worker_ends_its_children(
    tmp_path: Path, module: Callable[[str], str], runtime: MakeRuntime
) -> None:
    child = tmp_path / "child"
    name = module(
        "import subprocess, sys, pathlib, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\ntime.sleep(600)"
    )
    spec = WorkerSpec(name, (), tmp_path / "log", places=Places(writable=(tmp_path,)))
    worker = runtime().start(spec)
    until(lambda: child.is_file() and child.read_text() != "")
    worker.kill()
    assert worker.exit_code() == -signal.SIGKILL
    until(lambda: not is_alive(int(child.read_text())))


def test_a_stopped_worker_may_end_in_its_own_way(
    tmp_path: Path, module: Callable[[str], str], runtime: MakeRuntime
) -> None:
    log = tmp_path / "log"
    name = module(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('set', flush=True)\ntime.sleep(600)"
    )
    worker = runtime().start(WorkerSpec(name, (), log))
    until(lambda: "set" in log.read_text())
    worker.stop()
    until(lambda: worker.exit_code() is not None)
    assert worker.exit_code() == 7
    # After its end no process may be signalled.
    worker.stop()


@pytest.mark.parametrize(
    "made",
    [
        "worker_processes.LocalProcesses(isolated=True)",
        "forked_workers.ForkedProcesses(isolated=True, log=log, libraries={'worker_of_test': ()})",
    ],
)
def test_a_worker_dies_with_its_parent(
    tmp_path: Path, module: Callable[[str], str], made: str
) -> None:
    name = module("import time\ntime.sleep(600)")
    program = (
        "import time, pathlib\n"
        "from tuneship.processes import forked_workers, worker_processes\n"
        "from tuneship.processes.worker_protocol import WorkerSpec\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        f"worker = {made}.start(WorkerSpec({name!r}, (), log))\n"
        "time.sleep(0.5)\nprint(worker.pid, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ, text=True
    )
    with parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_alive(worker)
        parent.kill()
    until(lambda: not is_alive(worker))
