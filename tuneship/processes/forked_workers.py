"""Workers that are forked from a process with their libraries loaded (`fork_server.py`), where the host allows it.

Everything else about a worker is as in `worker_processes.py`. The server starts with the first worker that is to be
forked and ends with the service. When it dies, the workers live on, and the next start brings another one.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tuneship.processes.fork_server import CANNOT_FORK, ForkRequest
from tuneship.processes.launch import adopt_orphans
from tuneship.processes.worker_processes import OFFLINE, LocalProcesses, WorkerProcess
from tuneship.processes.worker_protocol import Worker, WorkerSpec
from tuneship.settings import worker_environment

logger = logging.getLogger(__name__)

# The modules whose workers are forked, and what is loaded before.
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "tuneship.serving": ("torch", "tuneship.serving.replica", "tuneship.serving.sampling.guides"),
    # In several parts: a request that comes meanwhile waits for one of them only.
    "tuneship.training": (
        "torch",
        "torch.distributed.tensor",
        "transformers.generation",
        "transformers.modeling_utils",
        "peft",
        "tuneship.training.training_loop",
    ),
}
# A driver that was initialised before a fork does not work after it, and a library may do that while it is loaded.
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
# A fork waits until the libraries are loaded.
FORK_PATIENCE_S = 120.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02
# Room for the command lines that workers show.
PADDING = " " * 4096
# Exit code of a worker whose server died before it was forked: most likely there was no memory.
NEVER_FORKED = -signal.SIGKILL


class ForkedProcess:
    """A process that was requested from a fork server. Obeys `Process`; may be used on any thread."""

    def __init__(self, status: socket.socket) -> None:
        """`status`: the socket that delivers the process id, or closes without one if the fork failed."""
        status.setblocking(False)
        self._status = status
        self._pid: int | None = None
        self._exit_code: int | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """The process id, once the libraries are loaded. Raises `ProcessLookupError` where no process was forked."""
        end = time.monotonic() + FORK_PATIENCE_S
        while self.poll() is None and self._pid is None:
            if time.monotonic() > end:
                self.abandon()
            time.sleep(LONGEST_PAUSE_S)
        if self._pid is None:
            raise ProcessLookupError
        return self._pid

    def poll(self) -> int | None:
        """Return the exit code: None while it runs or is not forked yet, negative if a signal ended it."""
        with self._lock:
            self._read_pid()
            if self._pid is not None and self._exit_code is None:
                # It is no child of this process for a moment: the one between ends after it has sent the number.
                with suppress(ChildProcessError):
                    pid, status = os.waitpid(self._pid, os.WNOHANG)
                    if pid:
                        self._exit_code = os.waitstatus_to_exitcode(status)
            return self._exit_code

    def wait(self, timeout: float) -> int:
        """Wait for the end and return the exit code. Raises `subprocess.TimeoutExpired`."""
        end, pause = time.monotonic() + timeout, SHORTEST_PAUSE_S
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked worker", timeout)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return code

    def abandon(self) -> None:
        """Make sure that a process which is not forked yet never runs."""
        with self._lock:
            if self._pid is None and self._exit_code is None:
                self._status.shutdown(socket.SHUT_RD)  # from now on its number cannot be sent
                self._read_pid()

    def reap_group(self) -> None:
        """Reap its child processes, which this process adopts when they outlive it."""
        if self._pid is not None and self._exit_code is not None:
            # Not before it has ended itself, whose exit code would be lost here.
            with suppress(ChildProcessError):
                while os.waitpid(-self._pid, os.WNOHANG)[0]:
                    pass

    def _read_pid(self) -> None:
        if self._pid is not None or self._exit_code is not None:
            return
        try:
            number = self._status.recv(32)
        except BlockingIOError:
            return
        if number:
            self._pid = int(number)
        else:
            self._exit_code = NEVER_FORKED
        self._status.close()


class ForkedWorker(WorkerProcess):
    """A worker that is forked as soon as its libraries are loaded."""

    def __init__(self, process: ForkedProcess, temporary: Path | None) -> None:
        """See `WorkerProcess`."""
        super().__init__(process, temporary)
        self._forked = process

    def kill(self) -> None:
        """See `WorkerProcess`."""
        super().kill()
        self._forked.reap_group()

    def _signal(self, number: signal.Signals) -> None:
        self._forked.abandon()
        super()._signal(number)


class ForkedProcesses(LocalProcesses):
    """Forks the workers of the built-in engines; other programs are started as `LocalProcesses` does."""

    def __init__(
        self,
        *,
        isolated: bool,
        log: Path,
        libraries: Mapping[str, tuple[str, ...]] = LIBRARIES,
    ) -> None:
        """`isolated`: see `LocalProcesses`. `log`: file for the output of the server. `libraries`: see `LIBRARIES`."""
        super().__init__(isolated=isolated)
        self._log = log
        self._libraries = libraries
        has_gpu = any(device.exists() for device in GPU_DEVICES)
        self._can_fork = sys.platform == "linux" and not has_gpu
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._lock = threading.Lock()

    def preload(self, module: str) -> None:
        """Load the libraries of this module's workers while nothing is to be forked."""
        if self._can_fork:
            self._send(ForkRequest(self._libraries[module]), [])

    def close(self) -> None:
        """End the server. Workers that were requested and are not forked yet never run."""
        with self._lock:
            self._end_server()

    def _started(
        self, spec: WorkerSpec, variables: Mapping[str, str], log: int, temporary: Path | None
    ) -> Worker:
        libraries = self._libraries.get(spec.module)
        if not self._can_fork or libraries is None:
            return super()._started(spec, variables, log, temporary)
        ours, theirs = socket.socketpair()
        arguments = tuple(self._launch_arguments(spec, temporary))
        request = ForkRequest(libraries, arguments, variables, spec.inherited)
        try:
            with theirs:
                is_sent = self._send(request, [theirs.fileno(), log, *spec.inherited])
        except BaseException:
            ours.close()
            raise
        if not is_sent:
            ours.close()
            return super()._started(spec, variables, log, temporary)
        return ForkedWorker(ForkedProcess(ours), temporary)

    def _send(self, request: ForkRequest, descriptors: list[int]) -> bool:
        """Send a request to the server, and start it where none runs; returns False where workers cannot be forked."""
        with self._lock:
            if self._server is not None and (code := self._server.poll()) is not None:
                logger.warning("the fork server ended with %s: see %s", code, self._log.name)
                self._can_fork = code != CANNOT_FORK
                self._end_server()
            if self._can_fork and self._server is None:
                self._start_server()
            if not self._can_fork or self._requests is None:
                return False
            try:
                socket.send_fds(self._requests, [request.to_json()], descriptors)
            except ConnectionError:  # it is ending: the next request finds out why
                return False
            return True

    def _start_server(self) -> None:
        """Start the server; it dies with the thread that this is called on."""
        try:
            adopt_orphans()
        except OSError:
            self._can_fork = False
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = (str(os.getpid()), str(theirs.fileno()), PADDING)
        try:
            with theirs, self._log.open("ab") as log:
                self._server = subprocess.Popen(  # noqa: S603 - our own module
                    [sys.executable, "-m", "tuneship.processes.fork_server", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=worker_environment(OFFLINE),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        self._requests = ours

    def _end_server(self) -> None:
        if self._server is not None and self._requests is not None:
            self._requests.close()
            self._server.kill()
            self._server.wait()
        self._server = self._requests = None
