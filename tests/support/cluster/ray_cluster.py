"""A Ray cluster of this machine: a head without cores and nodes beside it, from an environment of its own.

The service and its agents run from the test's environment, which has no Ray.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.support.service.processes import ROOT
from tests.support.waiting import children, free_port, until

PROGRAM = "ray[default]==2.60.0"
ALWAYS = (
    "--block",
    "--disable-usage-stats",
    "--object-store-memory=80000000",
    # The system chooses the ports of workers.
    "--min-worker-port=0",
    "--max-worker-port=0",
)
PORTS = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port",
         "metrics-export-port")  # fmt: skip


def install_ray(folder: Path) -> Path:
    """Install the program; return its command."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", PROGRAM]
    subprocess.run(command, check=True, timeout=900)
    return folder / "bin" / "ray"


class RayNodes:
    """The nodes of one cluster, each a group of processes."""

    def __init__(self, command: Path, *, keeps_state: bool = False) -> None:
        """`keeps_state`: the head writes its state to the disk, so that it can be started again."""
        self._command = command
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self.token = secrets.token_hex(16)
        self.token_file = self.folder / "token"
        self.token_file.write_text(self.token)
        self._port, dashboard = free_port(), free_port()
        self.url = f"http://127.0.0.1:{dashboard}"
        self._state = (
            {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.folder / "gcs")}
            if keeps_state
            else {}
        )
        self._head_arguments = (
            "--head", f"--port={self._port}", f"--dashboard-port={dashboard}",
            "--dashboard-host=127.0.0.1", f"--ray-client-server-port={free_port()}",
            "--num-cpus=0", f"--temp-dir={self.folder / 't'}",
        )  # fmt: skip
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.start_head()

    def start_head(self) -> None:
        """Start the head, at the same ports as before, and wait until it answers."""
        # Nodes beside it on one machine and this file make Ray believe that the head still runs.
        (self.folder / "t" / "ray_current_cluster").unlink(missing_ok=True)
        self._head = self._start(*self._head_arguments, **self._state)
        until(lambda: self._answers(self._head))

    def _start(self, *arguments: str, **environment: str) -> "subprocess.Popen[bytes]":
        ports = (f"--{name}={free_port()}" for name in PORTS)
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                [self._command, "start", *ALWAYS, *ports, *arguments],
                env=os.environ
                | {
                    "HOME": str(self.folder),
                    "PYTHONPATH": str(ROOT),
                    "RAY_AUTH_MODE": "token",
                    "RAY_AUTH_TOKEN": self.token,
                    **environment,
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _answers(self, process: "subprocess.Popen[bytes]") -> bool:
        assert process.poll() is None, (self.folder / "log").read_text()[-2000:]
        with suppress(httpx.HTTPError):
            return self.get("/api/jobs/").status_code == 200
        return False

    def get(self, path: str) -> httpx.Response:
        """Call the dashboard with the token."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=60, trust_env=False)

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that Ray knows."""
        return self.get("/api/jobs/").json()

    def add_node(self, cpus: int, labels: str = "") -> None:
        """Start a node, and wait until the cluster has it. `labels`: `name=value,...`."""
        given = [f"--labels={labels}"] if labels else []
        address = f"{until(self.alive)[0]['node_ip']}:{self._port}"
        self.nodes.append(self._start(f"--address={address}", f"--num-cpus={cpus}", *given))
        count = len(self.nodes) + 1
        until(lambda: len(self.alive()) == count)

    def alive(self) -> list[dict[str, Any]]:
        """The nodes that Ray believes to live; none while it does not answer."""
        try:
            found = self.get("/api/v0/nodes").json()
        except httpx.HTTPError:
            return []
        nodes = found["data"]["result"]["result"] if found.get("result") else []
        return [one for one in nodes if one["state"] == "ALIVE"]

    def kill_node(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill everything on a node at once, as if its machine had failed."""
        _kill_all(process)
        self.nodes.remove(process)

    def kill_head(self) -> None:
        """Kill everything on the head at once."""
        _kill_all(self._head)

    def close(self) -> None:
        """End all processes."""
        for process in (*self.nodes, self._head):
            process.terminate()
        for process in (*self.nodes, self._head):
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _kill_all(process: "subprocess.Popen[bytes]") -> None:
    for pid in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(process: int) -> list[int]:
    """Process ids of all children of a process and of theirs."""
    found = children(process)
    return [*found, *(one for child in found for one in descendants(child))]


@contextmanager
def ray_nodes(command: Path, *, keeps_state: bool = False) -> Iterator[RayNodes]:
    """Start a head; its nodes end with it."""
    nodes = RayNodes(command, keeps_state=keeps_state)
    try:
        yield nodes
    finally:
        nodes.close()
