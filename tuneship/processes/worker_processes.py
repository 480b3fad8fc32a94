"""Workers as processes on this machine, with own process groups and minimal environments, ended with the service."""

import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tuneship.isolation.landlock import Places
from tuneship.processes.launch import (
    COMMAND,
    GPUS,
    ISOLATED,
    MEMORY,
    OPEN,
    READ,
    WEAKLY_ISOLATED,
    WRITE,
)
from tuneship.processes.worker_protocol import Worker, WorkerSpec
from tuneship.settings import worker_environment

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    # Two busy thread pools on few cores cost more than half the speed unless waiting threads sleep.
    "OMP_WAIT_POLICY": "PASSIVE",
    # No threads that start with the library: a waiting trainer could not restrict them to its own files.
    "OPENBLAS_NUM_THREADS": "1",
}
# Prefix of the folders for temporary files; `service/access/isolation.py` removes what a killed
# service left.
TEMPORARY = "worker-"


# A killed process ends at once, unless the kernel waits in it for a disk or a network file system.
KILL_PATIENCE_S = 3.0
# The most time for a worker whose last line is awaited.
RUN_TIMEOUT_S = 60.0
POLL_S = 0.02

logger = logging.getLogger(__name__)


class Process(Protocol):
    """The methods of `subprocess.Popen` that a worker needs."""

    @property
    def pid(self) -> int:
        """The process id. Raises `ProcessLookupError` where no process was started."""
        ...

    def poll(self) -> int | None:
        """Return the exit code: None while it runs, negative if a signal ended it."""
        ...

    def wait(self, timeout: float) -> int:
        """Wait for the end and return the exit code. Raises `subprocess.TimeoutExpired`."""
        ...


class WorkerProcess:
    """A worker in a process group of its own."""

    def __init__(self, process: Process, temporary: Path | None) -> None:
        """Watch a process that leads its group; its folder for temporary files is removed when it ends."""
        self._process = process
        self._temporary = temporary

    @property
    def pid(self) -> int:
        """The process id, which is also that of its group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._remove_temporary()
        return code

    def stop(self) -> None:
        """Send SIGTERM to the group."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the group and wait until the process is gone, unless the kernel cannot end it."""
        self._signal(signal.SIGKILL)
        try:
            self._process.wait(KILL_PATIENCE_S)
        except subprocess.TimeoutExpired:
            logger.warning("process %s was killed and does not end", self.pid)
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                try:
                    os.killpg(self._process.pid, number)
                except ProcessLookupError:  # it does not lead a group yet
                    os.kill(self._process.pid, number)


class LocalProcesses:
    """The default runtime. Call `start` from a thread that lives as long as the service (see `launch.py`)."""

    def __init__(self, *, isolated: bool) -> None:
        """`isolated`: a worker that cannot be isolated does not start; otherwise it is isolated as far as possible.

        Workers that need the network are not isolated at all. See `isolation.py`.
        """
        self._isolated = isolated

    def start(self, spec: WorkerSpec) -> Worker:
        """Start the module in a new process group."""
        threads = {"OMP_NUM_THREADS": str(spec.threads)} if spec.threads else {}
        temporary = None if spec.needs_network else Path(tempfile.mkdtemp(prefix=TEMPORARY))
        places = {} if temporary is None else {"TMPDIR": str(temporary)}
        variables = {**OFFLINE, **threads, **places, **spec.environment}
        try:
            with spec.log.open("ab") as log:
                return self._started(spec, variables, log.fileno(), temporary)
        except BaseException:
            if temporary is not None:
                temporary.rmdir()
            raise

    def preload(self, module: str) -> None:
        """Do nothing: each process loads its own libraries."""

    def _started(
        self, spec: WorkerSpec, variables: Mapping[str, str], log: int, temporary: Path | None
    ) -> Worker:
        process = subprocess.Popen(  # noqa: S603 - our own module and paths
            [*COMMAND, *self._launch_arguments(spec, temporary)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=worker_environment(variables),
            pass_fds=spec.inherited,
            start_new_session=True,
        )
        return WorkerProcess(process, temporary)

    def _launch_arguments(self, spec: WorkerSpec, temporary: Path | None) -> list[str]:
        """The command line after `COMMAND`; see `launch.py`."""
        parent, module = str(os.getpid()), [spec.module, *spec.arguments]
        if temporary is None:
            return [parent, OPEN, *module]
        writable = (temporary, *spec.places.writable)
        return [
            parent,
            ISOLATED if self._isolated else WEAKLY_ISOLATED,
            *(f"{READ}{path.absolute()}" for path in spec.places.readable),
            *(f"{WRITE}{path.absolute()}" for path in writable),
            *([f"{MEMORY}{spec.memory_bytes}"] if spec.memory_bytes else []),
            *([GPUS] if spec.places.uses_gpus else []),
            *module,
        ]


def last_line(module: str, argument: str, places: Places) -> str:
    """Run a module in an isolated worker to its end, and return the last line that it prints.

    Raises `ValueError` with that line if the worker fails or takes too long, and `OSError`.
    """
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        log = Path(folder) / "log"
        spec = WorkerSpec(module, (argument,), log, places=places)
        worker = LocalProcesses(isolated=True).start(spec)
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while worker.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        worker.kill()
        last = "".join(log.read_text().splitlines()[-1:])
    if worker.exit_code() != 0:
        raise ValueError(last)
    return last
