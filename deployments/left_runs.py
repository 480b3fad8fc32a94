"""Marks the runs Crashed whose processes ended with the worker, so that their places are free and the guard starts.

`python -m deployments.left_runs`, before a worker starts: `make up` runs it. The automation for silent runs does not
see these, because it knows only heartbeats since the start of the server.
"""

import os
from contextlib import suppress

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus
from prefect.states import Crashed

from deployments.definitions import WORK_POOL, WORKER

MESSAGE = "its process ended with the worker"
_Types, _Parents, _Names = FlowRunFilterStateType, FlowRunFilterParentFlowRunId, WorkPoolFilterName


def crash_left_runs() -> list[FlowRun]:
    """Mark the runs of the work pool, and their subflows, whose processes are gone. Returns them.

    Runs are left alone while another worker takes from the pool: their processes may be on its machine.
    """
    with get_client(sync_client=True) as client:
        workers = client.read_workers_for_work_pool(WORK_POOL)
        if any(one.name != WORKER and one.status is WorkerStatus.ONLINE for one in workers):
            return []
        pool = WorkPoolFilter(name=_Names(any_=[WORK_POOL]))
        begun = client.read_flow_runs(flow_run_filter=_begun(), work_pool_filter=pool)
        left = [run for run in begun if not _is_alive(run)]
        generation = left
        while generation:
            parents = _Parents(any_=[run.id for run in generation])
            generation = client.read_flow_runs(flow_run_filter=_begun(parents))
            left += generation
        # The subflows first: the guard, which the crash of a release starts, must not take them for living ones.
        for run in reversed(left):
            client.set_flow_run_state(run.id, Crashed(message=MESSAGE))
    return left


def _begun(parents: FlowRunFilterParentFlowRunId | None = None) -> FlowRunFilter:
    types = _Types(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    state = FlowRunFilterState(type=types)
    return FlowRunFilter(state=state, parent_flow_run_id=parents)


def _is_alive(run: FlowRun) -> bool:
    if not run.infrastructure_pid:
        # A worker took it and had started no process yet. Any other such run was started by a person.
        return run.state_type is not StateType.PENDING
    with suppress(ValueError, OverflowError):
        try:
            os.kill(int(str(run.infrastructure_pid).rpartition(":")[2]), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
    return True


if __name__ == "__main__":
    for crashed in crash_left_runs():
        print(f"{crashed.name} is marked Crashed: {MESSAGE}")  # noqa: T201 - for the terminal of `make up`
