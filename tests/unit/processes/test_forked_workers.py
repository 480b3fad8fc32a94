"""Workers are forked from a server that has their libraries loaded, and depend on it for nothing else."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.waiting import is_alive, until
from tuneship.isolation.landlock import Places
from tuneship.processes import forked_workers
from tuneship.processes.forked_workers import ForkedProcesses
from tuneship.processes.worker_protocol import Worker, WorkerSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")

ROOT = Path(__file__).parents[3]
LIBRARY, WORKER = "library_of_test", "worker_of_test"
SLEEPS = "import time\nprint('runs', flush=True)\ntime.sleep(600)\n"
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a module, on the path of the server and of workers."""
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{modules}")

    def to(name: str, text: str) -> None:
        (modules / f"{name}.py").write_text(text)

    to(LIBRARY, "print('loaded', flush=True)\n")
    to(WORKER, SLEEPS)
    return to


@pytest.fixture
def server_log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def forked(server_log: Path, write: Write) -> Iterator[ForkedProcesses]:
    libraries = {WORKER: (LIBRARY,)}
    with closing(ForkedProcesses(isolated=True, log=server_log, libraries=libraries)) as runtime:
        yield runtime


@pytest.fixture
def start(forked: ForkedProcesses, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Start a worker that writes into the file `log`."""
    with ExitStack() as undo:

        def begin(*arguments: str, log: str = "log", **fields: object) -> Worker:
            spec = WorkerSpec(WORKER, arguments, tmp_path / log, **fields)  # pyright: ignore[reportArgumentType]
            worker = forked.start(spec)
            undo.callback(worker.kill)
            return worker

        yield begin


def server_of(log: Path) -> int:
    """The process id of the server that prints it in its library."""
    return int(until(lambda: log.exists() and log.read_text().strip()).splitlines()[-1])


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_libraries_are_loaded_once_and_chance_is_not_shared(
    start: Callable[..., Worker], write: Write, server_log: Path, tmp_path: Path
) -> None:
    write(LIBRARY, "import random, sys\nprint('loaded', flush=True)\n")
    write(WORKER, f"import random, sys\nprint({LIBRARY!r} in sys.modules, random.random())")
    workers = [start(log=f"log-{number}") for number in range(3)]
    until(lambda: all(worker.exit_code() == 0 for worker in workers))
    said = [(tmp_path / f"log-{number}").read_text().split() for number in range(3)]
    assert [words[0] for words in said] == ["True"] * 3
    assert len({words[1] for words in said}) == 3
    assert lines(server_log) == ["loaded"]


def test_a_worker_is_a_child_of_its_service_and_says_what_it_runs(
    start: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = start("first", "second")
    until(lambda: lines(tmp_path / "log"))
    assert (parent_of(worker.pid), os.getsid(worker.pid)) == (os.getpid(), worker.pid)
    command = Path(f"/proc/{worker.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert command[0] == os.fsencode(sys.executable)
    assert command[-3:] == [WORKER.encode(), b"first", b"second"]


@pytest.mark.parametrize("server_first", [False, True])
def test_it_has_the_descriptors_that_it_was_given_under_their_numbers_and_no_others(
    write: Write, tmp_path: Path, *, server_first: bool
) -> None:
    write(
        WORKER,
        "import os, sys\n"
        "for name in sys.argv[1:]:\n    print(os.read(int(name), 9).decode())\n"
        "listed = os.listdir('/proc/self/fd')  # the one that reads the folder is among them\n"
        "print(sorted(int(one) for one in listed if os.path.exists(f'/proc/self/fd/{one}')))\n",
    )
    # A process of its own has the low numbers that the server uses itself, and that must not be mixed up.
    write(
        "service_of_test",
        "import os, sys, time\nfrom pathlib import Path\n"
        "from tuneship.processes.forked_workers import ForkedProcesses\n"
        "from tuneship.isolation.landlock import Places\n"
        "from tuneship.processes.worker_protocol import WorkerSpec\n"
        "folder = Path(sys.argv[1])\n"
        f"runtime = ForkedProcesses(isolated=True, log=folder / 'server', libraries={{{WORKER!r}: ()}})\n"
        f"if {server_first}:\n    runtime.preload({WORKER!r})\n"
        "pipes = [os.pipe() for _ in range(3)]\n"
        "numbers = [reader for reader, _ in reversed(pipes)]\n"
        "for reader, writer in pipes:\n    os.write(writer, f'pipe {reader}'.encode())\n"
        f"spec = WorkerSpec({WORKER!r}, tuple(map(str, numbers)), folder / 'log', 0, tuple(numbers), {{}},\n"
        "    Places((Path('/proc'),)))\n"
        "worker = runtime.start(spec)\n"
        "while worker.exit_code() is None:\n    time.sleep(0.01)\n"
        "server = Path(f'/proc/self/task/{os.getpid()}/children').read_text().split()[0]\n"
        "socket = Path(f'/proc/{server}/cmdline').read_text().split('\\0')[4]\n"
        "print([numbers, int(socket)])\n",
    )
    command = [sys.executable, "-m", "service_of_test", str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True).stdout
    numbers, socket_of_server = json.loads(output)
    # The server's own socket has a number that is free in the service from then on.
    assert (socket_of_server in numbers) is server_first
    *said, open_ones = lines(tmp_path / "log")
    assert said == [f"pipe {number}" for number in numbers]
    assert json.loads(open_ones) == sorted((0, 1, 2, *numbers))


def test_workers_outlive_the_server_and_the_next_start_brings_another(
    start: Callable[..., Worker], write: Write, server_log: Path, tmp_path: Path
) -> None:
    write(LIBRARY, "import os\nprint(os.getpid(), flush=True)\n")
    write(WORKER, "import signal, sys\n" + SLEEPS.replace("600", "int(sys.argv[1])"))
    first = start("600", log="first")
    until(lambda: lines(tmp_path / "first"))
    server = server_of(server_log)
    os.kill(server, signal.SIGKILL)
    until(lambda: not is_alive(server))
    assert first.exit_code() is None
    second = start("0", log="second")
    until(lambda: second.exit_code() == 0)
    assert server_of(server_log) != server
    assert first.exit_code() is None
    first.stop()
    until(lambda: first.exit_code() == -signal.SIGTERM)


def test_a_worker_that_is_killed_before_it_is_forked_never_runs(
    start: Callable[..., Worker], write: Write, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    write(LIBRARY, f"open({str(gate)!r}).read()\n")  # until somebody opens it to write
    killed, kept = start(log="killed"), start(log="kept")
    assert (killed.exit_code(), kept.exit_code()) == (None, None)
    killed.kill()
    assert killed.exit_code() == -signal.SIGKILL
    gate.write_text("go")
    until(lambda: lines(tmp_path / "kept") == ["runs"])
    assert lines(tmp_path / "killed") == []
    assert kept.exit_code() is None


def test_a_worker_whose_server_dies_before_the_fork_has_ended(
    start: Callable[..., Worker], write: Write
) -> None:
    write(LIBRARY, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    worker = start()
    until(lambda: worker.exit_code() == -signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        _ = worker.pid
    write(LIBRARY, "")
    again = start()
    until(lambda: again.pid)
    assert again.exit_code() is None


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (
            "from threading import Event, Thread\nThread(target=Event().wait, daemon=True).start()\n",
            "RuntimeError: a library has started a thread",
        ),
        ("import nothing_of_that_name\n", "ModuleNotFoundError"),
    ],
)
def test_workers_are_started_once_the_server_cannot_fork(
    start: Callable[..., Worker],
    write: Write,
    server_log: Path,
    tmp_path: Path,
    library: str,
    reason: str,
) -> None:
    write(LIBRARY, library)
    worker = start()
    until(lambda: worker.exit_code() is not None)
    assert reason in lines(server_log)[-1]
    again = start()
    until(lambda: lines(tmp_path / "log") == ["runs"])
    assert again.exit_code() is None


def test_nothing_is_forked_where_there_is_a_gpu(
    write: Write, server_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(WORKER, "")
    monkeypatch.setattr(forked_workers, "GPU_DEVICES", (tmp_path,))
    libraries = {WORKER: (LIBRARY,)}
    with closing(ForkedProcesses(isolated=True, log=server_log, libraries=libraries)) as runtime:
        runtime.preload(WORKER)
        worker = runtime.start(WorkerSpec(WORKER, (), tmp_path / "log"))
        until(lambda: worker.exit_code() == 0)
    assert not server_log.exists()


def test_libraries_can_be_loaded_before_the_first_worker(
    forked: ForkedProcesses, start: Callable[..., Worker], server_log: Path, tmp_path: Path
) -> None:
    forked.preload(WORKER)
    until(lambda: lines(server_log) == ["loaded"])
    start()
    until(lambda: lines(tmp_path / "log") == ["runs"])
    assert lines(server_log) == ["loaded"]


def test_the_end_of_a_worker_leaves_no_process_of_its_group(
    start: Callable[..., Worker], write: Write, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    write(
        WORKER,
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\nchild.wait()\n",
    )
    worker = start(places=Places(writable=(tmp_path,)))
    orphan = int(until(lambda: child.exists() and child.read_text()))
    worker.kill()
    # This process has adopted it, so that nobody else can take note of its end.
    until(lambda: worker.kill() or not Path(f"/proc/{orphan}").exists())


def test_no_worker_is_forked_after_the_end(
    forked: ForkedProcesses, start: Callable[..., Worker], write: Write, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    write(LIBRARY, f"open({str(gate)!r}).read()\n")
    worker = start()
    forked.close()
    until(lambda: worker.exit_code() == -signal.SIGKILL)
    assert lines(tmp_path / "log") == []
