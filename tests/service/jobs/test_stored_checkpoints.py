"""Checkpoints go to the store of files as they come, and the next attempt gets the one that the row names."""

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.objects.files import contents_below
from tests.support.objects.object_server import ObjectServer
from tests.support.service.in_process import Service
from tests.support.waiting import until_async
from tuneship.host.thread_pools import Threads
from tuneship.service.jobs.launcher import StoredCheckpoint
from tuneship.service.jobs.stored_checkpoints import FOLDER, StoredCheckpoints
from tuneship.service.jobs.work_folders import clear_work
from tuneship.store.database import tables
from tuneship.store.files.blobs import BlobsAway
from tuneship.store.files.local_blobs import LocalBlobs
from tuneship.store.files.quarantine import left_over, objects_of
from tuneship.store.records.job_leases import LEASE
from tuneship.training.checkpoint_folders import step_folder
from tuneship.training.spec import FORMAT_FILE

FILES = {"state.json": b"state", "tensors.safetensors": b"tensors"}


class Machine:
    """The work folder of one machine, and what its attempt at a job knows of the store."""

    def __init__(self, folder: Path, blobs: LocalBlobs, attempt: int, row: Any = None) -> None:
        self.attempt = folder / f"attempt-{attempt}"
        self.folder = folder / FOLDER
        for place in (self.attempt, self.folder):
            place.mkdir(parents=True, exist_ok=True)
        job = {"id": "ft_1", "attempt": attempt, "checkpoint": row}
        threads = Threads("test", 1)
        self.stored = StoredCheckpoints(
            job, self.attempt, blobs, threads, lambda: datetime.now(UTC)
        )

    def save(self, step: int) -> None:
        """Keep a checkpoint as the training process does."""
        (self.folder / FORMAT_FILE).write_text("float32")
        place = step_folder(self.folder, step)
        place.mkdir()
        for name, content in FILES.items():
            (place / name).write_bytes(content + str(step).encode())

    async def upload(self, step: int) -> StoredCheckpoint:
        def is_stored() -> bool:
            self.stored.look()
            return self.stored.newest is not None and self.stored.newest.step == step

        await until_async(is_stored)
        assert self.stored.newest is not None
        return self.stored.newest


def files_in(folder: Path) -> dict[str, bytes]:
    """Contents by the path below the folder."""
    return {str(path.relative_to(folder)): file for path, file in contents_below(folder).items()}


@pytest.fixture
def blobs(tmp_path: Path) -> LocalBlobs:
    return LocalBlobs(tmp_path / "data")


def row_of(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    return {
        "attempt": checkpoint.attempt,
        "step": checkpoint.step,
        "objects": dict(checkpoint.objects),
    }


def test_the_next_machine_goes_on_from_the_checkpoint_of_the_row(
    tmp_path: Path, blobs: LocalBlobs
) -> None:
    one = Machine(tmp_path / "one", blobs, 1)
    one.save(8)
    stored = asyncio.run(one.upload(8))
    assert (stored.attempt, stored.step, set(stored.objects)) == (1, 8, {*FILES, FORMAT_FILE})
    other = Machine(tmp_path / "other", blobs, 2, row_of(stored))
    other.stored.fetch()
    assert files_in(other.folder) == files_in(one.folder)
    # A later one of its own is not replaced.
    later = Machine(tmp_path / "later", blobs, 2, row_of(stored))
    later.save(16)
    before = files_in(later.folder)
    later.stored.fetch()
    assert files_in(later.folder) == before


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_checkpoint_that_cannot_be_used_is_left_out_and_the_next_one_is_stored(
    tmp_path: Path, blobs: LocalBlobs, fault: str
) -> None:
    one = Machine(tmp_path / "one", blobs, 1)
    one.save(8)
    stored = asyncio.run(one.upload(8))
    file = blobs.path_of("checkpoints/ft_1/1-8") / "tensors.safetensors"
    if fault == "missing":
        file.unlink()
    else:
        file.write_bytes(b"x")
    other = Machine(tmp_path / "other", blobs, 2, row_of(stored))
    other.stored.fetch()
    assert files_in(other.folder) == {}
    other.save(4)
    assert asyncio.run(other.upload(4)).attempt == 2


def test_earlier_ones_stay_until_the_row_names_a_later_one(
    tmp_path: Path, blobs: LocalBlobs
) -> None:
    one = Machine(tmp_path / "one", blobs, 1)

    def kept() -> list[str]:
        return sorted(place.name for place in blobs.path_of("checkpoints/ft_1").iterdir())

    async def run() -> None:
        one.save(1)
        await one.upload(1)
        one.save(2)
        second = await one.upload(2)
        assert kept() == ["1-1", "1-2"]
        one.stored.keep_only(second)
        one.save(3)
        await one.upload(3)
        await until_async(lambda: kept() == ["1-2", "1-3"])

    asyncio.run(run())


def test_a_store_that_is_away_is_tried_again_later(
    tmp_path: Path, blobs: LocalBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Machine(tmp_path / "one", blobs, 1)
    put, tries = blobs.put, list[str]()

    def away(path: Path, key: str) -> str:
        tries.append(key)
        if len(tries) == 1:
            raise BlobsAway("status code: 503")
        return put(path, key)

    monkeypatch.setattr(blobs, "put", away)
    one.save(1)
    assert asyncio.run(one.upload(1)).step == 1
    assert len(tries) == 1 + len(FILES) + 1


@pytest.mark.parametrize("files_before", [0, 1, 2])
def test_an_upload_that_outlasts_its_job_leaves_nothing(
    tmp_path: Path, blobs: LocalBlobs, monkeypatch: pytest.MonkeyPatch, files_before: int
) -> None:
    one = Machine(tmp_path / "one", blobs, 1)
    put, done, is_over = blobs.put, list[str](), threading.Event()

    def ends_meanwhile(path: Path, key: str) -> str:
        if len(done) == files_before:  # as `WorkFolders.clear` does
            clear_work(tmp_path, "one")
            blobs.delete("checkpoints/ft_1")
        done.append(key)
        return put(path, key)

    def last_delete(key: str) -> None:
        delete(key)
        if key == "checkpoints/ft_1/1-8":
            is_over.set()

    delete = blobs.delete
    monkeypatch.setattr(blobs, "put", ends_meanwhile)
    monkeypatch.setattr(blobs, "delete", last_delete)
    one.save(8)

    async def run() -> None:
        one.stored.look()
        await until_async(is_over.is_set)
        one.stored.stop()

    asyncio.run(run())
    assert len(done) > files_before
    assert not [name for name in blobs.names() if name.startswith("checkpoints/")]


def test_those_of_ended_jobs_are_deleted_after_a_day(service: Service) -> None:
    job_id = service.job(compute_config={"max_runtime_hours": 48})  # it outlasts the day
    service.trainer().start_of(2)
    blobs = service.parts.blobs
    kept, gone = (blobs.path_of(f"checkpoints/{name}") for name in (job_id, "ft_ended"))
    for folder in (kept, gone):
        (folder / "1-8").mkdir(parents=True)
    service.clock.ahead += timedelta(hours=26)
    service.until(lambda: not gone.exists())
    assert kept.exists()
    assert not (service.settings.data_dir / "set-aside").exists()


def test_one_that_an_ended_job_left_is_no_fault(service: Service) -> None:
    job_id = service.job()
    service.trainer().complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    for name in (job_id, "ft_unknown"):
        (service.parts.blobs.path_of(f"checkpoints/{name}") / "1-8").mkdir(parents=True)
    with service.database.read() as connection:
        found = left_over(connection, service.parts.blobs.names(), objects_of(connection))
    assert found == {"checkpoints/ft_unknown"}


@pytest.mark.slow
def test_the_row_names_what_is_in_the_bucket_until_the_job_has_ended(
    start: Callable[..., Service], bucket: str, object_server: ObjectServer
) -> None:
    service = start(blob_url=bucket)
    job_id = service.job()

    def row() -> Any:
        query = sa.select(tables.jobs.c.checkpoint)
        with service.database.read() as connection:
            return connection.scalar(query.where(tables.jobs.c.id == job_id))

    def stored() -> set[str]:
        return {one for one in object_server.objects(bucket) if one.startswith("checkpoints/")}

    def save(trainer: Any, step: int) -> None:
        folder = trainer.folder.parent / FOLDER
        (folder / FORMAT_FILE).write_text("float32")
        place = step_folder(folder, step)
        place.mkdir()
        for name, content in FILES.items():
            (place / name).write_bytes(content)

    trainer = service.trainer()
    trainer.start_of(4)
    trainer.step(2)
    save(trainer, 2)
    service.until(lambda: row() is not None)
    assert (row()["attempt"], row()["step"]) == (1, 2)
    names = {f"checkpoints/{job_id}/1-2/{name}" for name in (*FILES, FORMAT_FILE)}
    assert stored() == names
    # An attempt that finds an empty work folder, as on another machine.
    service.rest()
    for file in (service.settings.data_dir / "work").glob("*/checkpoints/*/*"):
        file.unlink()
    for folder in (service.settings.data_dir / "work").glob("*/checkpoints/*/"):
        folder.rmdir()
    service.clock.ahead += LEASE
    service.go_on()
    again = service.trainer(1)
    assert files_in(step_folder(again.folder.parent / FOLDER, 2)) == FILES
    again.start_of(4, resumed_from=2)
    save(again, 3)
    service.until(lambda: row()["step"] == 3)
    service.until(lambda: {name.split("/")[2] for name in stored()} == {"2-3"})
    again.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    assert row() is None
    service.until(lambda: stored() == set())
