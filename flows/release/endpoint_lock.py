"""One release of an endpoint at a time: the others wait, and then compare with the deployment that serves by then.

A lock in the records folder, which every worker shares: it dies with its process. Prefect's global concurrency limits
do not: after SIGKILL the slot of a dead run was still taken three minutes later (seen on 3.8.8). It only
saves double work: that traffic has one driver is ensured by the service and by the rollout's record.
"""

import hashlib
import time
from collections.abc import Generator
from contextlib import contextmanager

from prefect import get_run_logger

from flows.forms.release_form import EndpointChoice
from flows.shared.journal import FileLock
from tasks.endpoints import NO_SUCH_ROUTE, get_canary_endpoint
from tuneship.client import ApiError
from tuneship.prefect.connection import service_name
from tuneship.settings import PipelineSettings

POLL_SECONDS = 1.0
# Names of the locks of this process: a retraining calls the release flow while it holds the lock itself.
_held: set[str] = set()


@contextmanager
def endpoint_lock(endpoint: EndpointChoice) -> Generator[None]:
    """Wait until no other release of this endpoint runs, then hold its lock; a flow called by the holder has it."""
    shared_name = endpoint.name
    if not shared_name:
        # Other releases may name the same endpoint: the lock has its name, or its id where the service reports no name.
        shared_name = str(endpoint.id)
        try:
            shared_name = get_canary_endpoint(shared_name).name or shared_name
        except ApiError as error:
            if error.status not in NO_SUCH_ROUTE:
                raise
    name = hashlib.sha256(f"{service_name()} {shared_name}".encode()).hexdigest()[:16]
    if name in _held:
        yield
        return
    folder = PipelineSettings().records.expanduser() / "turns"
    lock = FileLock(folder / f"{name}.lock")
    if not lock.take():
        get_run_logger().info("waiting: another release of this endpoint is in progress")
        while not lock.take():
            time.sleep(POLL_SECONDS)
    _held.add(name)
    try:
        yield
    finally:
        _held.discard(name)
        lock.release()
