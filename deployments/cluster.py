"""A whole cluster on one machine, to try it: `python -m deployments.cluster up|down|status` (`make up-cluster`).

`up` starts PostgreSQL, an S3 server, a Ray head with two nodes, three services and a balancer before them; what already
runs stays. `down` ends exactly these. Everything lies in one folder, so the next `up` goes on with it. This shows how
the parts work together and what happens when one fails; for machines of their own see docs/cluster.md.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import NoReturn

from deployments.background_processes import AtWork, NotStarted, ProcessFolder, say
from deployments.cluster_parts import (
    NODES,
    ROOT,
    SERVICES,
    ClusterProgram,
    Place,
    balancer,
    check_installed,
    objects,
    postgres,
    ray_head,
    ray_node,
    service,
)

# In the order in which they start; they end in the other one.
PARTS: dict[str, Callable[[Place], ClusterProgram]] = {
    "postgres": postgres,
    "objects": objects,
    "ray-head": ray_head,
    **{name: partial(ray_node, name=name) for name in NODES},
    **{name: partial(service, name=name) for name in SERVICES},
    "balancer": balancer,
}
FOLDER, PORT = ROOT / ".cluster", 8800


class TrialCluster:
    """The processes of a cluster on one machine."""

    def __init__(self, folder: Path, port: int, settings: Mapping[str, str] | None = None) -> None:
        """`port`: where the balancer listens; `settings`: more variables for the services."""
        self._folder = folder.resolve()
        self._port = port
        self._settings = settings or {}
        self._processes = ProcessFolder(self._folder / "run")

    @cached_property
    def place(self) -> Place:
        """The folder, and how the parts reach each other; made at its first use. Raises `OSError`."""
        return Place(self._folder, self._port, self._settings)

    def up(self) -> None:
        """Start what does not run. Raises `NotStarted`, `AtWork` or `OSError`."""
        check_installed()
        with self._processes.alone():
            for name, make in PARTS.items():
                if self._processes.running(name) is None:
                    say(f"starting {name}")
                    part = make(self.place)
                    self._processes.start(name, part.command, part.environment, part.is_ready)

    def down(self) -> None:
        """End what `up` started, nothing else. Raises `AtWork`."""
        with self._processes.alone():
            for name in reversed(PARTS):
                say(f"{name}: {'stopped' if self._processes.stop(name) else 'was not running'}")

    def status(self) -> None:
        """Print which processes run, and how the cluster is reached."""
        for name in PARTS:
            process = self._processes.running(name)
            state = f"process {process.pid}" if process else "not running"
            say(f"{name:<12} {state}, log {self._processes.log(name)}")
        if self._processes.running("balancer") is not None:
            say(f"address      {self.place.url}")
            say(f"credentials  {self.place.credentials}")

    def process(self, name: str) -> int | None:
        """The id of a running part's process."""
        found = self._processes.running(name)
        return None if found is None else found.pid

    def kill_node(self, name: str) -> None:
        """Kill everything on a Ray node at once, as if its machine had failed. Nothing happens when it does not run."""
        process = self._processes.running(name)
        if process is not None:
            for pid in [process.pid, *descendants(process.pid)]:
                with suppress(ProcessLookupError):  # it ended with its parent
                    os.kill(pid, signal.SIGKILL)
            while self._processes.running(name) is not None:
                time.sleep(0.05)


def descendants(process: int) -> list[int]:
    """Process ids of all children of a process, of theirs, and so on."""
    found = list[int]()
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            found += map(int, file.read_text().split())
    return [*found, *(one for child in found for one in descendants(child))]


def main() -> NoReturn:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="deployments.cluster", description=__doc__)
    parser.add_argument("command", choices=("up", "down", "status"))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="keeps everything")
    parser.add_argument("--port", type=int, default=PORT, help="of the balancer")
    chosen = parser.parse_args()
    try:
        cluster = TrialCluster(chosen.folder, chosen.port)
        {"up": cluster.up, "down": cluster.down, "status": lambda: None}[chosen.command]()
        if chosen.command != "down":
            cluster.status()
    except KeyboardInterrupt:
        sys.stderr.write(
            "interrupted; `make down-cluster` ends what runs, as does `python -m deployments.cluster down`\n"
        )
        sys.exit(130)
    except (NotStarted, AtWork) as failure:
        sys.exit(str(failure))
    except OSError as fault:
        sys.exit(f"{fault.filename or 'this command'}: {fault.strerror}")
    sys.exit(0)


if __name__ == "__main__":
    main()
