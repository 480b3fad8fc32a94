"""A process is killed at some point of a release: the same run again, or the guard, restores the invariants.

They are: at most one job and one deployment for each run key, a split that sums to 100, nothing left over, and a model
that serves. Each commit kills most victims at one point; `make soak` does the rest.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from prefect.client.orchestration import get_client

from tests.support.waiting import is_alive, until
from tests.system.kill_matrix.gate import POINTS, Point
from tests.system.kill_matrix.place import Release
from tests.system.kill_matrix.prefect_place import PATIENCE_S, Worker

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.long]
Script = subprocess.Popen[bytes]
STOPPED_WITHIN_S = 300.0


@contextmanager
def held(release: Release, point: Point) -> Iterator[Script]:
    """Run the release's script up to the point and yield it; afterwards the script is killed if it still runs."""
    script = prepared(release, point).start()
    try:
        reach(release, lambda: script.poll() is None)
        yield script
    finally:
        if script.poll() is None:
            script.kill()
        script.wait()
        release.setup.may_train.set()


def prepared(release: Release, point: Point) -> Release:
    """Let the proxy hold the release at this point; around a job, no training ends until the case is settled."""
    if not point.is_first_release:
        release.serve_base_model()
    if "job" in point.name:
        release.setup.may_train.clear()
    release.setup.proxy.stop_at(point)
    return release


def reach(release: Release, is_running: Callable[[], bool]) -> None:
    proxy = release.setup.proxy
    until(lambda: proxy.reached.is_set() or not is_running(), PATIENCE_S)
    assert proxy.reached.is_set(), release.said


def flow_is_killed(release: Release, point: Point) -> None:
    """Kill the flow; a run with the same parameters continues what the dead run left."""
    with held(release, point) as script:
        script.kill()
        script.wait()
        release.setup.proxy.cut()
        release.check_serving()
    again = release.run_again()
    release.check_promoted(again.outcome, again.reason)
    assert len(release.run_keys) == 1, "it is the same run"


def flow_is_killed_for_good(release: Release, point: Point) -> None:
    """Kill the flow and do not run it again; the guard removes what the dead run left."""
    with held(release, point) as script:
        script.kill()
        script.wait()
        release.setup.proxy.cut()
        release.check_serving()
        release.guard_until_closed()
        release.check_given_back()


def flow_is_stopped(release: Release, point: Point, number: signal.Signals) -> None:
    """Stop the flow by a signal; it removes what it created before it ends."""
    with held(release, point) as script:
        script.send_signal(number)
        assert script.wait(STOPPED_WITHIN_S) == 128 + number, release.said
        release.setup.proxy.cut()
        release.check_given_back()
    again = release.run_again()
    release.check_promoted(again.outcome, again.reason)


def flow_is_terminated(release: Release, point: Point) -> None:
    flow_is_stopped(release, point, signal.SIGTERM)


def flow_is_interrupted(release: Release, point: Point) -> None:
    flow_is_stopped(release, point, signal.SIGINT)


@contextmanager
def held_in_worker(release: Release, point: Point) -> Iterator[Worker]:
    """Start a run of the deployment in a worker and yield the worker when the run is held at the point."""
    deployment_id = release.setup.prefect.register_chain()
    worker = Worker(prepared(release, point).environment, release.folder / "said.txt")
    try:
        with get_client(sync_client=True) as client:
            parameters = {"release": release.parameters}
            client.create_flow_run_from_deployment(deployment_id, parameters=parameters)
        reach(release, lambda: worker.process.poll() is None)
        yield worker
    finally:
        worker.stop()
        release.setup.may_train.set()


def worker_is_killed(release: Release, point: Point) -> None:
    """Kill the worker; its flow may go on, and a run with the same parameters finishes what it does not."""
    with held_in_worker(release, point) as worker:
        flows = worker.flow_processes()
        worker.kill()
        release.setup.may_train.set()
        release.setup.proxy.let_pass()
        until(lambda: not any(is_alive(pid) for pid in flows), PATIENCE_S)
    finish(release)


def worker_and_flow_are_killed(release: Release, point: Point) -> None:
    with held_in_worker(release, point) as worker:
        flows = worker.flow_processes()
        worker.kill()
        for pid in flows:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(is_alive(pid) for pid in flows))
        release.setup.proxy.cut()
        release.check_serving()
        release.guard_until_closed()
        release.check_given_back()


def flow_in_worker_is_killed(release: Release, point: Point) -> None:
    """Kill the flow under a living worker; Prefect's crash hook, in its own process, removes what was created."""
    with held_in_worker(release, point) as worker:
        for pid in worker.flow_processes():
            os.kill(pid, signal.SIGKILL)
        release.setup.proxy.cut()
        until(lambda: release.outcome == "aborted", PATIENCE_S)
        release.check_given_back()
    again = release.run_again()
    release.check_promoted(again.outcome, again.reason)


def service_is_killed(release: Release, point: Point) -> None:
    """Kill the service and start it again; the flow waits for it, or is run again."""
    serve = release.setup.serve
    assert serve is not None
    with held(release, point) as script:
        serve.kill()
        release.setup.proxy.cut()
        serve.start()
        script.wait(PATIENCE_S)
    finish(release)


def prefect_is_restarted(release: Release, point: Point) -> None:
    """Kill and restart the Prefect server; the flow goes on without it, or is run again."""
    prefect = release.setup.prefect
    with held(release, point) as script:
        prefect.kill()
        release.setup.may_train.set()
        release.setup.proxy.let_pass()
        prefect.start()
        script.wait(PATIENCE_S)
    finish(release)


def finish(release: Release) -> None:
    """Run the release again unless it was promoted already."""
    outcome, reason = release.outcome, ""
    if outcome != "promoted":
        release.check_serving()
        again = release.run_again()
        outcome, reason = again.outcome, again.reason
    release.check_promoted(outcome, reason)


VICTIMS: dict[str, Callable[[Release, Point], None]] = {
    "flow-SIGKILL": flow_is_killed,
    "flow-SIGKILL-guard": flow_is_killed_for_good,
    "flow-SIGTERM": flow_is_terminated,
    "flow-SIGINT": flow_is_interrupted,
    "flow-in-worker-SIGKILL": flow_in_worker_is_killed,
    "worker-SIGKILL": worker_is_killed,
    "worker-and-flow-SIGKILL": worker_and_flow_are_killed,
    "service-SIGKILL": service_is_killed,
    "prefect-restart": prefect_is_restarted,
}
BY_NAME = {point.name: point for point in POINTS}
PER_COMMIT = {
    "flow-SIGKILL": ["mid-shift", "after-evaluation"],
    "flow-SIGKILL-guard": ["mid-evaluation"],
    "flow-in-worker-SIGKILL": ["mid-shift"],
    "worker-SIGKILL": ["after-shift"],
    "worker-and-flow-SIGKILL": ["bake"],
    "service-SIGKILL": ["after-shift"],
    "prefect-restart": ["mid-shift"],
}
IN_MAKE_TEST = {
    ("flow-SIGKILL", "mid-shift"),
    ("worker-SIGKILL", "after-shift"),
    ("service-SIGKILL", "after-shift"),
}


def marks(victim: str, point: str) -> list[pytest.MarkDecorator]:
    if point not in PER_COMMIT.get(victim, ()):
        return [pytest.mark.soak]
    return [pytest.mark.essential] if (victim, point) in IN_MAKE_TEST else []


CASES = [
    pytest.param(*(victim, point), id=f"{victim}-{point}", marks=marks(victim, point))
    for victim in VICTIMS
    for point in BY_NAME
]


@pytest.mark.parametrize(("victim", "point"), CASES)
def test_every_kill_at_every_point(release: Release, victim: str, point: str) -> None:
    VICTIMS[victim](release, BY_NAME[point])
