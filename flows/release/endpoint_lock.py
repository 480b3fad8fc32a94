"""One release of an endpoint at a time: the others wait, and then compare with the deployment that serves by then.

A lock in the records folder, which every worker shares: it dies with its process. Prefect's global concurrency limits
do not: after SIGKILL the slot of a dead run was still taken three minutes later (seen on 3.8.8). It only
saves double work: that traffic has one driver is ensured by the service and by the rollout's record.
"""

import hashlib
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from prefect import get_run_logger
from prefect.runtime import flow_run

from flows.forms.release_form import EndpointChoice
from flows.release.record_file import ReleaseRecords
from flows.shared.journal import FileLock
from tasks.endpoints import NO_SUCH_ROUTE, get_canary_endpoint
from tuneship.client import ApiError, TuneshipError
from tuneship.host.durable import write_private
from tuneship.prefect.connection import api, service_name
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
    records = PipelineSettings().records
    holder = records.expanduser() / "turns" / f"{name}.run"
    lock = FileLock(holder.with_suffix(".lock"))
    if not lock.take():
        get_run_logger().info(
            "waiting: %s of this endpoint is in progress", _named(holder, ReleaseRecords(records))
        )
        while not lock.take():
            time.sleep(POLL_SECONDS)
    _held.add(name)
    try:
        with suppress(OSError):  # a full disk must not stop a release: whoever waits sees no name
            write_private(holder, str(flow_run.root_flow_run_id))
        yield
    finally:
        _held.discard(name)
        with suppress(OSError):
            holder.unlink(missing_ok=True)
        lock.release()


def _named(holder: Path, records: ReleaseRecords) -> str:
    """The release whose flow run this file names, by its id at the service and its run key where they are known."""
    with suppress(OSError):
        record = records.of_flow_run(holder.read_text())
        if record is not None:
            # A service may have no releases, and a key may lack their scope.
            with suppress(TuneshipError):
                found = api().releases.list(limit=1, run_key=record.run_key).releases
                if found:
                    return f"release {found[0].id} (run key {record.run_key})"
            return f"the release with the run key {record.run_key}"
    return "another release"
