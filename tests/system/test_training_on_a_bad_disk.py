"""The disk fails, fills up or writes half while a real trainer works: the job succeeds, or reports why it failed.

No partial file is ever taken for a whole one, and nothing that was acknowledged is lost.
"""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import invariants
from tests.support.faults.refusing_kernel import FLUSH, RENAME, Fault, Kernel
from tests.support.objects.opened import opened
from tests.support.service.in_process import jsonl
from tests.support.service.processes import Serve, rows_file, start_job
from tests.support.waiting import until
from tuneship.client import ApiError, Client
from tuneship.contract.datasets import DatasetMerge, DatasetUpload
from tuneship.contract.jobs import ENDED, Job
from tuneship.store.database import tables
from tuneship.store.database.database import Database, sqlite_url
from tuneship.training.__main__ import DISK_BROKEN, DISK_FULL

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into an isolated process"),
]
WRITE = ("write",)
# Seconds in which up to three training processes, one after the other, can load their libraries.
PATIENCE_S = 600.0
CHECKPOINT, ADAPTER, PROGRESS = "/checkpoints/", "/output/", r"/progress\.jsonl$"
STORED, DATABASE = r"/\.staged-", r"sqlite-wal$"


@dataclass
class Environment:
    """A service, the jobs that it has run, and the results of a job without a fault."""

    kernel: Kernel
    serve: Serve
    rows: Path
    # Status of each job.
    jobs: dict[str, str] = field(default_factory=dict[str, str])
    expected: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def ended(self, client: Client) -> Job:
        """Upload the rows, start a job and wait for its end."""
        return self.end_of(client, start_job(client, self.rows, epochs=2))

    def end_of(self, client: Client, job_id: str) -> Job:
        until(lambda: client.jobs.get(job_id).status in ENDED, PATIENCE_S)
        job = client.jobs.get(job_id)
        self.jobs[job.id] = job.status
        return job

    def check_results(self, client: Client, job: Job) -> None:
        """Check that the results equal those of the job without a fault, to the last bit."""
        assert job.status == "completed", job.error
        assert self.results(client, job) == self.expected
        self.check()

    def results(self, client: Client, job: Job) -> dict[str, Any]:
        metrics = client.jobs.metrics(job.id).model_dump(exclude={"job_id", "created_at"})
        files = self.opened(tables.models)
        mine = f"models/{job.id}-"
        adapter = {name.rpartition("/")[2]: files[name] for name in files if mine in name}
        return {"adapter": adapter, **metrics}

    def opened(self, table: Any) -> dict[str, bytes]:
        database = Database(sqlite_url(self.serve.data_dir / "tuneship.sqlite"))
        with database.read() as connection:
            found = opened(connection, self.serve.data_dir, table)
        database.close()
        return found

    def check(self) -> None:
        """Check that everything that was created is there and whole."""
        database = Database(sqlite_url(self.serve.data_dir / "tuneship.sqlite"))
        with database.read() as connection:
            jobs = {row["id"]: row["status"] for row in invariants.rows_of(connection, tables.jobs)}
            assert jobs == self.jobs
            invariants.check_rows(connection)
            assert connection.exec_driver_sql("pragma integrity_check").scalar() == "ok"
        database.close()
        folders = [one.name for one in (self.serve.data_dir / "blobs" / "models").glob("*")]
        assert {one for one in folders if self.jobs[one.rpartition("-")[0]] != "completed"} == set()
        self.opened(tables.datasets)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder, kernel = tmp_path_factory.mktemp("place"), Kernel()
    serve = Serve(folder / "data", starter=kernel.start, preload_training="true")
    made = Environment(kernel, serve, rows_file(folder / "rows.jsonl", 72))
    try:
        client = serve.client()
        undisturbed = made.ended(client)
        assert undisturbed.status == "completed", undisturbed.error
        made.expected = made.results(client, undisturbed)
        yield made
    finally:
        serve.stop()


@pytest.fixture
def client(environment: Environment) -> Client:
    return environment.serve.client()


@pytest.mark.soak
def test_a_partial_write_of_a_trainer_is_continued(
    environment: Environment, client: Client
) -> None:
    files = (CHECKPOINT, ADAPTER, PROGRESS, STORED)
    with environment.kernel.injected(*(Fault(WRITE, is_half=True, path=one) for one in files)):
        job = environment.ended(client)
    environment.check_results(client, job)


@pytest.mark.soak
def test_a_service_that_cannot_store_for_a_while_stores_it_later(
    environment: Environment, client: Client
) -> None:
    """Fail the storing of the job's progress first, then that of its adapter."""
    begun = Fault(WRITE, is_half=True, path=PROGRESS, last=1)
    progress = Fault(("pwrite64",), error="EIO", path=DATABASE, last=6, after=begun)
    stored = Fault(WRITE, error="ENOSPC", path=STORED, first=2, last=3, after=begun)
    flushed = Fault(FLUSH, error="EIO", path="/blobs/models", last=2)
    with environment.kernel.injected(begun, progress, stored, flushed):
        job = environment.ended(client)
    environment.check_results(client, job)


def test_a_trainer_that_dies_while_it_writes_goes_on_from_what_is_whole(
    environment: Environment, client: Client
) -> None:
    kept = Fault(WRITE, is_deadly=True, is_half=True, path=CHECKPOINT, first=4, last=4)
    named = Fault(RENAME, is_deadly=True, path=ADAPTER, last=1)
    with environment.kernel.injected(kept, named):
        job = environment.ended(client)
    environment.check_results(client, job)
    messages = [entry.message for entry in client.jobs.logs(job.id).logs]
    assert sum("resumes from its checkpoint" in message for message in messages) == 2


@pytest.mark.parametrize(
    ("calls", "error", "path", "first"),
    [
        (WRITE, "ENOSPC", CHECKPOINT, 3),
        pytest.param(WRITE, "EIO", ADAPTER, 2, marks=pytest.mark.soak),
        pytest.param(WRITE, "ENOSPC", PROGRESS, 5, marks=pytest.mark.soak),
        pytest.param(FLUSH, "EIO", CHECKPOINT, 1, marks=pytest.mark.soak),
        pytest.param(RENAME, "ENOSPC", ADAPTER, 1, marks=pytest.mark.soak),
    ],
)
def test_a_failed_write_fails_the_job_with_the_reason(
    environment: Environment,
    client: Client,
    calls: Sequence[str],
    error: str,
    path: str,
    first: int,
) -> None:
    # Later writes to the progress file must succeed, so that the failure can be reported.
    last = first if path == PROGRESS else None
    with environment.kernel.injected(Fault(calls, error=error, path=path, first=first, last=last)):
        job = environment.ended(client)
    assert job.status == "failed"
    assert job.error is not None
    error_fields = (job.error.code, job.error.reason, job.error.message)
    message = DISK_FULL if error == "ENOSPC" else DISK_BROKEN
    assert error_fields == ("fine_tuning_error", "internal", message)
    assert job.fine_tuned_model is None
    environment.check()


@pytest.mark.soak  # it takes three attempts
def test_a_trainer_that_cannot_say_anything_has_made_no_progress(
    environment: Environment, client: Client
) -> None:
    with environment.kernel.injected(Fault(WRITE, error="ENOSPC", path=PROGRESS, first=1)):
        job = environment.ended(client)
    assert job.error is not None
    assert (job.status, job.error.reason) == ("failed", "no_progress")
    environment.check()


def test_uploads_that_the_disk_takes_in_parts_are_whole_and_those_it_refuses_are_not_there(
    environment: Environment, client: Client
) -> None:
    dice = random.Random(1)  # noqa: S311 - content, not a secret
    content = b"".join(
        jsonl({"instruction": f"{dice.random()}", "response": "x" * 1000}) for _ in range(3000)
    )
    form = DatasetUpload(name="d", format="instruction")
    once = client.with_options(tries=1)
    with environment.kernel.injected(Fault(WRITE, error="ENOSPC", path=STORED, first=3)):
        with pytest.raises(ApiError) as refused:
            once.datasets.upload(form, BytesIO(content))
        assert (refused.value.status, refused.value.code) == (503, "internal_error")
    with environment.kernel.injected(Fault(WRITE, is_half=True, path=STORED)):
        parts = [client.datasets.upload(form, BytesIO(content)).id for _ in range(2)]
        both = client.datasets.merge(DatasetMerge(dataset_ids=parts, name="both")).id
        until(lambda: client.datasets.get(both).status == "processed")
    kept = environment.opened(tables.datasets)
    assert [kept[f"datasets/{one}/data.jsonl"] for one in parts] == [content] * 2
    assert len(kept[f"datasets/{both}/data.jsonl"].splitlines()) == 6000
    environment.check()


def test_after_a_restart_nothing_half_made_is_left(environment: Environment) -> None:
    environment.serve.kill()
    environment.serve.start()
    environment.check()
    database = Database(sqlite_url(environment.serve.data_dir / "tuneship.sqlite"))
    with database.read() as connection:
        invariants.check_settled(connection, environment.serve.data_dir)
    database.close()
