"""Tests of each part of a worker's isolation. `test_escapes.py` tries whether all of them hold together."""

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S, until
from tuneship.isolation import isolation, system_calls
from tuneship.isolation.isolation import CannotIsolate
from tuneship.isolation.landlock import Places
from tuneship.isolation.system_calls import ARCHITECTURES, CONDITIONAL, REFUSED, SIGNALS
from tuneship.processes.worker_protocol import Runtime, WorkerSpec

ROOT = Path(__file__).parents[3]
NO_LANDLOCK = ("-m", "tests.support.faults.weak_host", "--no-landlock", sys.executable)
TRIES_A_SOCKET = """
import socket
try:
    socket.socket()
    print("yes")
except PermissionError:
    print("no")
"""
Maker = Callable[..., WorkerSpec]
Said = Callable[..., str]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing isolates")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Make the spec of a worker that runs the given text."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path / 'modules'}")
    (tmp_path / "modules").mkdir()

    def make(text: str, **fields: object) -> WorkerSpec:
        (tmp_path / "modules" / "worker_of_test.py").write_text(text)
        return WorkerSpec("worker_of_test", (), tmp_path / "log", **fields)  # pyright: ignore[reportArgumentType]

    return make


@pytest.fixture
def said(runtime: Callable[[bool], Runtime]) -> Said:
    """Run a worker to its end, and return what it printed."""

    def run(spec: WorkerSpec, *, isolated: bool = True) -> str:
        worker = runtime(isolated).start(spec)
        until(lambda: worker.exit_code() is not None)
        return spec.log.read_text()

    return run


def printed(*command: str) -> str:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    ).stdout


@pytest.mark.parametrize(("needs_network", "reached"), [(False, "no\n"), (True, "yes\n")])
def test_workers_are_started_without_network_unless_they_need_it(
    spec: Maker, said: Said, needs_network: bool, reached: str
) -> None:
    assert said(spec(TRIES_A_SOCKET, needs_network=needs_network)) == reached


def test_a_worker_reaches_its_places_and_may_write_to_some_of_them(
    spec: Maker, said: Said, tmp_path: Path
) -> None:
    for name in ("readable", "writable", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    places = Places((tmp_path / "readable",), (tmp_path / "writable",))
    found = said(
        spec(
            "import pathlib, tempfile\n"
            f"for name in ('readable', 'writable', 'other', tempfile.gettempdir()):\n"
            f"    folder = pathlib.Path({str(tmp_path)!r}, name)\n"
            "    for attempt in (lambda: (folder / 'file').read_text(), lambda: (folder / 'new').touch()):\n"
            "        try:\n            attempt()\n            print('yes')\n"
            "        except FileNotFoundError:\n            print('none')\n"
            "        except PermissionError:\n            print('no')\n",
            places=places,
        )
    ).split()
    assert found == ["yes", "no", "yes", "yes", "no", "no", "none", "yes"]


def test_a_base_model_may_be_a_folder_of_links(spec: Maker, said: Said, tmp_path: Path) -> None:
    """The cache of a model hub has such folders. The folder that the links lead to stays closed."""
    snapshot, stored = tmp_path / "snapshot", tmp_path / "stored"
    snapshot.mkdir()
    stored.mkdir()
    for name in ("named", "unnamed"):
        (stored / name).write_text(name)
    (snapshot / "model").symlink_to(stored / "named")
    found = said(
        spec(
            f"import os\nprint(open({str(snapshot / 'model')!r}).read())\n"
            f"try:\n    open({str(stored / 'unnamed')!r})\nexcept PermissionError:\n    print('closed')\n",
            places=Places((snapshot,)),
        )
    )
    assert found == "named\nclosed\n"


def test_a_workers_temporary_files_go_with_it(
    spec: Maker, runtime: Callable[[bool], Runtime]
) -> None:
    text = "import tempfile, time\nprint(tempfile.mkdtemp(), flush=True)\ntime.sleep(600)\n"
    worker_spec = spec(text)
    worker = runtime(True).start(worker_spec)
    folder = Path(until(lambda: worker_spec.log.read_text().strip()))
    assert folder.is_dir()
    worker.kill()
    assert not folder.parent.exists()


@pytest.mark.parametrize("mode", ["isolated", "weakly-isolated", "inherited", "open"])
def test_no_worker_can_be_looked_into_by_others_of_its_user(tmp_path: Path, mode: str) -> None:
    (tmp_path / "is_hidden.py").write_text(
        "import ctypes\nprint(ctypes.CDLL(None).prctl(3))  # PR_GET_DUMPABLE\n"
    )
    launch = [
        sys.executable,
        "-m",
        "tuneship.processes.launch",
        str(os.getpid()),
        mode,
        "is_hidden",
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    assert subprocess.check_output(launch, timeout=PATIENCE_S, env=environment) == b"0\n"


class TestCoreFiles:
    """The limit of 0 is lifted here, because it does not bind a program to which the kernel hands core files."""

    def test_are_left_by_other_programs(self, tmp_path: Path) -> None:
        if not dumped("", "sleeper", work_folder=tmp_path):
            pytest.skip("this host makes no core files")

    @pytest.mark.parametrize("mode", ["isolated", "weakly-isolated", "open", "inherited"])
    def test_are_not_left_by_workers(self, tmp_path: Path, mode: str) -> None:
        arguments = ("tuneship.processes.launch", str(os.getpid()), mode, "sleeper")
        assert not dumped(WITHOUT_LIMIT, *arguments, work_folder=tmp_path)


WITHOUT_LIMIT = """
import resource
real = resource.setrlimit
resource.setrlimit = lambda kind, limits: None if kind == resource.RLIMIT_CORE else real(kind, limits)
"""


def dumped(preamble: str, *module: str, work_folder: Path) -> bool:
    """Tell whether the kernel writes a core file when a module's process crashes."""
    (work_folder / "sleeper.py").write_text(
        "import time\nprint('runs', flush=True)\ntime.sleep(600)\n"
    )
    as_large_as_may_be = (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2
    run = f"import runpy\nrunpy.run_module({module[0]!r}, run_name='__main__', alter_sys=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", preamble + run, *module[1:]],
        stdout=subprocess.PIPE,
        cwd=work_folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{work_folder}"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, as_large_as_may_be),  # noqa: PLW1509
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        process.send_signal(signal.SIGSEGV)
        left = os.WCOREDUMP(os.waitpid(process.pid, 0)[1])
        # The process must not be waited for a second time.
        process.poll()
    return left


def test_each_call_is_decided_once_and_on_both_processors() -> None:
    tables = (REFUSED, CONDITIONAL, SIGNALS)
    names = [name for table in tables for name in table]
    assert len(set(names)) == len(names)
    for which, machine in enumerate(ARCHITECTURES):
        numbers = [both[which] for table in tables for both in table.values()]
        there = [number for number in numbers if number is not None]
        assert len(set(there)) == len(there)
        code = system_calls.instructions(machine, 1)
        # The kernel accepts no more instructions.
        assert len(code) < 4096
        for at, (kind, when, otherwise, _) in enumerate(code):
            if kind in {system_calls.JUMP_IF_EQUAL, system_calls.JUMP_IF_ANY}:
                assert at + 1 + max(when, otherwise) < len(code)
                assert max(when, otherwise) < 256


def test_a_host_without_a_filter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "m68k")
    with pytest.raises(CannotIsolate, match="m68k"):
        isolation.isolate(Places())


def test_a_kernel_without_landlock_isolates_nobody() -> None:
    program = (
        "from tuneship.isolation.isolation import *\nfrom tuneship.isolation.landlock import Places\n"
        "try:\n    isolate(Places())\nexcept CannotIsolate as error:\n    print(error)\n"
    )
    assert printed(*NO_LANDLOCK, "-c", program) == "the kernel has no Landlock: ENOSYS\n"


def test_the_network_is_closed_even_if_files_cannot_be() -> None:
    program = (
        "from tuneship.isolation.isolation import *\nfrom tuneship.isolation.landlock import Places\n"
        f"isolate(Places(), is_needed=False)\n{TRIES_A_SOCKET}"
    )
    assert printed(*NO_LANDLOCK, "-c", program) == "no\n"


def test_without_signals_in_landlock_the_filter_lets_a_process_signal_only_itself() -> None:
    program = (
        "import os\nfrom tuneship.isolation import isolation\nfrom tuneship.isolation.landlock import Places\n"
        "isolation.confine = lambda _: 5\n"
        "isolation.isolate(Places())\n"
        "os.kill(os.getpid(), 0)\n"
        "try:\n    os.kill(os.getppid(), 0)\nexcept PermissionError:\n    print('refused')\n"
    )
    assert printed("-c", program) == "refused\n"


CUDA_AT_ITS_START = """
import os, socket, threading, time
from pathlib import Path
from tuneship.isolation import isolation, landlock
landlock.NVIDIA_DRIVER = Path({driver!r})
isolation.isolate(landlock.Places(uses_gpus={uses_gpus}))
def outcome(action):
    try:
        action()
    except PermissionError:
        return "refused"
    return "done"
thread = threading.Thread(target=time.sleep, args=[600], daemon=True)
thread.start()
name = Path(f"/proc/self/task/{{thread.native_id}}/comm")
print("name", outcome(lambda: name.write_text("cuda")))
if not {uses_gpus} or {driver!r} != "/dev/null":
    raise SystemExit(print("socket", outcome(lambda: socket.socket(socket.AF_UNIX))))
print("internet", outcome(lambda: socket.socket(socket.AF_INET)))
print("datagrams", outcome(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)))
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    print("socket", outcome(lambda: socket.socket(socket.AF_UNIX, kind)))
one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
print("listen", outcome(lambda: (one.bind(f"\\0cuda-{{os.getpid()}}"), one.listen())))
print("file", outcome(lambda: socket.socket(socket.AF_UNIX).bind({path!r})))
print("accept", outcome(one.accept))
print("connect", outcome(lambda: socket.socket(socket.AF_UNIX).connect({listening!r})))
"""


def test_cuda_can_start_in_a_training_and_no_socket_of_it_gets_through(tmp_path: Path) -> None:
    """On an H200 it started if and only if it could name its threads and listen on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "listening"))
        listening.listen()
        found = {
            case: printed(
                "-c",
                CUDA_AT_ITS_START.format(
                    uses_gpus=case[0],
                    driver=case[1],
                    path=str(tmp_path / "new"),
                    listening=str(tmp_path / "listening"),
                ),
            ).splitlines()
            for case in ((False, "/dev/null"), (True, "/dev/none"), (True, "/dev/null"))
        }
    assert found[False, "/dev/null"] == ["name refused", "socket refused"]
    assert found[True, "/dev/none"] == ["name refused", "socket refused"], "there is no driver"
    closed = ["internet refused", "datagrams refused"]
    opened = ["name done", *closed, "socket done", "socket done", "listen done"]
    assert found[True, "/dev/null"] == [
        *(*opened, "file refused"),
        *("accept refused", "connect refused"),
    ]


def test_files_that_another_thread_would_keep_are_reported(tmp_path: Path) -> None:
    """A process that has threads must know this to start again, as a training process does."""
    program = (
        "import threading, time\nfrom pathlib import Path\nfrom tuneship.isolation import isolation\n"
        "from tuneship.isolation.landlock import Places\n"
        "print(isolation.narrow(Places()))\n"
        f"isolation.isolate(Places((Path({str(tmp_path)!r}),)))\n"
        "print(isolation.narrow(Places()))\n"
        "threading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
        "print(isolation.narrow(Places()))\n"
    )
    assert printed("-c", program).split() == ["True", "True", "False"]
