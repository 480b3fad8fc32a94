"""A Prefect server that can be killed and restarted at its address, and a worker as `make up` starts one."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists

from flows.script.local_processes import closed_server, new_auth_string, prefect_variables
from flows.tune_and_deploy import tune_and_deploy
from tests.support.prefect.prefect_servers import WITHOUT_SETTINGS
from tests.support.waiting import free_port, until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 600.0
POOL = "kill-matrix"
OWN = {**WITHOUT_SETTINGS, "PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "1"}


class PrefectServer:
    """A server that keeps its port and its database over any number of kills."""

    def __init__(self, folder: Path) -> None:
        """Start the server with this home."""
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/api"
        self.auth_string = new_auth_string()
        self.home = folder
        self._log = folder / "server.log"
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every process that works with this server."""
        own = {"PREFECT_HOME": str(self.home), "PREFECT_LOGGING_TO_API_ENABLED": "false"}
        return {**OWN, **own, **prefect_variables(self.url, self.auth_string)}

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with (
            socket.create_server(("127.0.0.1", self._port)) as listener,
            self._log.open("ab") as log,
        ):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.script.prefect_server", str(listener.fileno())],
                stdin=subprocess.PIPE,  # the server ends when this pipe closes with the tests
                stdout=log,
                stderr=log,
                env=self.environment | closed_server(self.url, self.auth_string),
                pass_fds=[listener.fileno()],
            )
        until(self._answers, PATIENCE_S)

    def kill(self) -> None:
        """Kill the server at once, as a power failure would."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=5.0).is_success
        return False

    def register_chain(self) -> Any:
        """Create the deployment of `prefect.yaml` over the API, by its module and without a pull step."""
        with get_client(sync_client=True) as client:
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
            return client.create_deployment(
                flow_id=client.create_flow(tune_and_deploy),
                name="kill-matrix",
                work_pool_name=POOL,
                entrypoint="flows.tune_and_deploy.tune_and_deploy",
                pull_steps=[],
                enforce_parameter_schema=True,
            )


class Worker:
    """A process worker and the flow that it has started."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        """Start the worker; no run is scheduled yet."""
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=environment
                | {
                    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
                    "PREFECT_WORKER_QUERY_SECONDS": "1",
                    "PREFECT_WORKER_PREFETCH_SECONDS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def flow_processes(self) -> list[int]:
        """Return the ids of the worker's living child processes."""
        return [
            pid
            for pid, parent, state in _processes()
            if parent == self.process.pid and state != "Z"
        ]

    def kill(self) -> None:
        """Kill the worker alone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Kill the worker and its remaining children at the end of a test."""
        children = self.flow_processes()
        if self.process.poll() is None:
            self.kill()
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes() -> list[tuple[int, int, str]]:
    """Return id, parent and state of every process."""
    found: list[tuple[int, int, str]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            found.append((int(folder.name), int(fields[1]), fields[0]))
    return found
