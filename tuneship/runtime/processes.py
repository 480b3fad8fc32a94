"""Workers as processes on this machine: own process group, minimal environment, dead when the service dies."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

from tuneship.runtime.launch import ISOLATED, OPEN
from tuneship.runtime.workers import Worker, WorkerSpec
from tuneship.settings import worker_environment

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    # Two busy thread pools on few cores cost more than half the speed unless waiting threads sleep.
    "OMP_WAIT_POLICY": "PASSIVE",
}


class Process:
    """A worker in a process group of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        """Watch a process that was started as leader of its group."""
        self._process = process

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """SIGTERM to the group."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the group; waits until the process is gone."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


class Processes:
    """The default runtime. Call `start` from a thread that lives as long as the service (see `launch.py`)."""

    def __init__(self, *, isolated: bool) -> None:
        """`isolated`: workers give up the network, but those that say they need it. See `isolation.py`."""
        self._isolated = isolated

    def start(self, spec: WorkerSpec) -> Worker:
        """Start the module in a new process group."""
        threads = {"OMP_NUM_THREADS": str(spec.threads)} if spec.threads else {}
        network = ISOLATED if self._isolated and not spec.needs_network else OPEN
        command = [sys.executable, "-m", "tuneship.runtime.launch", str(os.getpid()), network]
        with spec.log.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own module and paths
                [*command, spec.module, *spec.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=worker_environment({**OFFLINE, **threads, **spec.environment}),
                pass_fds=spec.inherited,
                start_new_session=True,
            )
        return Process(process)
