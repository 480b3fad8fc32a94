"""Runs the demo's releases on a cluster of this machine, and kills a node in the middle of the first training.

PostgreSQL, an S3 server, Ray with two nodes, three services and a balancer are started in one folder, `.demo-cluster`,
and end with this program (`deployments/cluster.py`). The release is promoted although the node that trained it is lost:
the training goes on from its last checkpoint on the other node, and requests are answered by other replicas.
"""

import argparse
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from demo import Demo, play
from demo_run import (
    FEWEST_ROWS,
    ROOT,
    SERVICE_SETTINGS,
    DemoRun,
    Memory,
    beside_prefect,
    emptied,
    number_of_rows,
    say,
    shown,
    summary,
)

from deployments.background_processes import NotStarted
from deployments.cluster import TrialCluster, descendants
from deployments.cluster_parts import NODES
from flows.shared.signals import Stopped, stop_once
from tuneship.client import Client, TuneshipError
from tuneship.settings import ClientSettings

TRAINING = b"tuneship.training"


class NodeFailure(threading.Thread):
    """Kills the node that trains once a checkpoint of the first job is kept, and starts it again."""

    def __init__(self, cluster: TrialCluster, settings: ClientSettings) -> None:
        """Wait for the job; `start` begins to wait."""
        super().__init__(daemon=True)
        self._cluster = cluster
        self._settings = settings
        # The node that was killed.
        self.killed: str | None = None

    def run(self) -> None:
        """Wait until the first job is half done, kill its node and start another one."""
        with Client(self._settings) as client:
            while not self._is_half_done(client):
                time.sleep(0.5)
        self.killed = next(filter(self._trains, NODES), None)
        if self.killed is None:
            return  # the training was over before it was found
        say(f"\n   ** {self.killed} is killed in the middle of the training **\n")
        self._cluster.kill_node(self.killed)
        self._cluster.up()

    @staticmethod
    def _is_half_done(client: Client) -> bool:
        try:
            first = client.jobs.list(limit=1).jobs[:1]
            jobs = [client.jobs.get(one.id) for one in first]
        except TuneshipError:
            return False
        return any(0 < job.total_steps <= 2 * job.current_step for job in jobs)

    def _trains(self, node: str) -> bool:
        process = self._cluster.process(node)
        found = descendants(process) if process else []
        return any(TRAINING in _command(one) for one in found)


def _command(process: int) -> list[bytes]:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []  # it has just ended


@contextmanager
def running(folder: Path, cluster: TrialCluster) -> Generator[DemoRun]:
    """Start the cluster and a Prefect server, and stop both at the end."""
    try:
        cluster.up()
        settings = ClientSettings.from_credentials(cluster.place.credentials)
        # The kill of a node is a line of this program, which would be written across a picture of the flow's.
        with beside_prefect(folder, settings, is_plain=True) as run:
            yield run
    finally:
        cluster.down()


def main() -> int:
    """Run the acts; 0 when each ended as it should and a node was killed."""
    parser = argparse.ArgumentParser(
        description="The demo's releases on a cluster of this machine."
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".demo-cluster", help="emptied at the start"
    )
    parser.add_argument("--port", type=int, default=8800, help="of the balancer")
    parser.add_argument(
        "--rows",
        type=number_of_rows,
        help=f"train on the first so many rows of each file, {FEWEST_ROWS} or more",
    )
    chosen = parser.parse_args()
    started = time.monotonic()
    memory = Memory()
    memory.start()
    folder = emptied(chosen.folder.resolve())
    cluster = TrialCluster(folder / "cluster", chosen.port, SERVICE_SETTINGS)
    with running(folder, cluster) as run:
        failure = NodeFailure(cluster, run.settings)
        failure.start()
        # Latency gates would judge this machine, which is too small for all of this.
        acts, failures = play(Demo(run, chosen.rows, is_busy=True))
    summary(acts, folder, time.monotonic() - started, memory)
    say(
        f"  {shown(Path(sys.executable))} -m deployments.cluster up --folder {shown(folder / 'cluster')}"
    )
    if failure.killed is None:
        failures.append("no node was killed during the training")
    for unmet in failures:
        say(f"FAILED: {unmet}")
    return 1 if failures else 0


if __name__ == "__main__":
    stop_once(say)
    try:
        sys.exit(main())
    except NotStarted as failure:
        sys.exit(str(failure))
    except Stopped as stopped:
        say("stopped; nothing is left running")
        sys.exit(stopped.exit_code)
