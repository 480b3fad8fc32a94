"""Leases fence, blobs are whole or absent, keys are single."""

import hashlib
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from tuneship.contract.errors import InvalidRequestError, ValidationRefused
from tuneship.contract.jobs import JobStatus
from tuneship.security.sealed_files import read_plain
from tuneship.store import idempotency, tables
from tuneship.store import job_leases as leases
from tuneship.store import queries as rows
from tuneship.store.blobs import Blobs, sha256_of
from tuneship.store.database import Database
from tuneship.store.job_leases import LEASE, JobLease, LeaseLost

NOW = datetime(2026, 1, 1, tzinfo=UTC)


pytestmark = pytest.mark.both_databases


def add_job(database: Database, job_id: str = "ft_1", **values: Any) -> None:
    row: dict[str, Any] = {
        "id": job_id, "client_id": "alice", "created_at": NOW, "updated_at": NOW, "tags": {},
        "base_model": "b", "dataset_id": "ds_1", "fine_tuning_method": "lora", "model_name": "m",
        "status": JobStatus.QUEUED, "hyperparameters": {}, "validation_frequency": 0.1,
        "compute_config": {}, "security_settings": {},
    }  # fmt: skip
    with database.write() as connection:
        rows.insert(connection, tables.jobs, row | values)


def claim(database: Database, now: datetime) -> rows.Row | None:
    with database.write() as connection:
        return leases.claim(connection, "owner", now)


def test_an_error_of_the_database_carries_no_values(database: Database) -> None:
    add_job(database)
    with pytest.raises(IntegrityError) as caught:
        add_job(database, model_name="a patient")
    assert "a patient" not in str(caught.value)


def test_a_job_is_claimed_by_one_until_its_lease_lapses(database: Database) -> None:
    add_job(database)
    first = claim(database, NOW)
    assert first is not None
    assert (first["attempt"], first["status"]) == (1, "running")
    assert claim(database, NOW + LEASE) is None
    second = claim(database, NOW + LEASE + timedelta(seconds=1))
    assert second is not None
    assert (second["attempt"], second["started_at"]) == (2, NOW)


def test_a_stale_attempt_writes_nothing(database: Database) -> None:
    add_job(database)
    claim(database, NOW)
    claim(database, NOW + LEASE * 2)
    stale, live = JobLease("ft_1", 1), JobLease("ft_1", 2)
    for change in (
        lambda one: leases.heartbeat(one, stale, NOW + LEASE * 3),
        lambda one: leases.write(one, stale, current_step=7),
        lambda one: leases.end(one, stale, JobStatus.COMPLETED, NOW),
    ):
        with pytest.raises(LeaseLost), database.write() as connection:
            change(connection)
    with database.write() as connection:
        leases.write(connection, live, current_step=3)
        assert rows.fetch(connection, tables.jobs, "ft_1", client_id=None)["current_step"] == 3  # type: ignore[index]


def test_a_job_that_is_being_cancelled_cannot_complete(database: Database) -> None:
    add_job(database)
    claim(database, NOW)
    with database.write() as connection:
        rows.change(connection, tables.jobs, "ft_1", NOW, status=JobStatus.CANCELLING)
    with pytest.raises(LeaseLost), database.write() as connection:
        leases.end(connection, JobLease("ft_1", 1), JobStatus.COMPLETED, NOW)


def test_after_a_restart_running_jobs_can_be_claimed_at_once(database: Database) -> None:
    add_job(database)
    claim(database, NOW)
    with database.write() as connection:
        leases.release_all(connection, NOW)
    assert claim(database, NOW) is not None


def test_jobs_are_taken_oldest_first(database: Database) -> None:
    add_job(database, "ft_new", created_at=NOW + timedelta(seconds=1))
    add_job(database, "ft_old")
    assert [claim(database, NOW)["id"] for _ in range(2)] == ["ft_old", "ft_new"]  # type: ignore[index]


def test_many_who_claim_at_once_get_different_jobs(database: Database) -> None:
    for number in range(16):
        add_job(database, f"ft_{number}")
    with ThreadPoolExecutor(16) as threads:
        taken = list(threads.map(lambda _: claim(database, NOW), range(20)))
    names = [row["id"] for row in taken if row is not None]
    assert (len(names), len(set(names)), taken.count(None)) == (16, 16, 4)


def test_an_idempotency_key_is_held_used_replayed_and_forgotten(database: Database) -> None:
    key = idempotency.Key("alice", "k", "f")
    answer = idempotency.StoredAnswer(201, "/x", b"{}")

    def begin(one: idempotency.Key, now: datetime) -> Any:
        with database.write() as connection:
            return idempotency.begin(connection, one, now)

    hold = begin(key, NOW)
    with pytest.raises(InvalidRequestError) as busy:
        begin(key, NOW)
    assert (busy.value.status, busy.value.retryable) == (409, True)
    later = begin(key, NOW + idempotency.LOCK)
    with pytest.raises(InvalidRequestError), database.write() as connection:
        idempotency.finish(connection, hold, answer)
    with database.write() as connection:
        idempotency.abandon(connection, hold)  # not its own any more
        idempotency.finish(connection, later, answer)
    assert begin(key, NOW) == answer
    with pytest.raises(ValidationRefused):
        begin(idempotency.Key("alice", "k", "other"), NOW)
    assert isinstance(begin(idempotency.Key("bob", "k", "other"), NOW), idempotency.Hold)
    after = NOW + idempotency.KEPT + timedelta(minutes=5)
    assert isinstance(begin(key, after), idempotency.Hold)


def test_a_disk_that_takes_a_part_of_a_block_keeps_no_part_of_a_file(tmp_path: Path) -> None:
    """Its last block fits in half, which is no error of the system's call."""
    blobs = Blobs(str(tmp_path / "blobs"), tmp_path / "scratch")
    file = tmp_path / "adapter"
    file.write_bytes(b"x" * 70_000)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def stage() -> None:
        with blobs.staged() as staged:
            staged.write(file.read_bytes())
            blobs.keep(staged, "datasets/ds_1/data.jsonl")

    resource.setrlimit(resource.RLIMIT_FSIZE, (68_000, most[1]))
    try:
        with pytest.raises(OSError, match="large"):
            blobs.put(file, "models/ft_1/adapter")
        with pytest.raises(OSError, match="large"):
            stage()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert blobs.names("models") == blobs.names("datasets") == set()
    assert list((tmp_path / "scratch").iterdir()) == []
    assert blobs.put(file, "models/ft_1/adapter") == sha256_of(file)


def test_a_blob_is_at_its_key_only_when_it_is_whole(tmp_path: Path) -> None:
    blobs = Blobs(str(tmp_path / "blobs"), tmp_path / "scratch")
    with blobs.staged() as staged:
        staged.write(b"half")
        assert not blobs.local("datasets/ds_1/data").exists()
        staged.write(b" and half")
        blobs.keep(staged, "datasets/ds_1/data.jsonl")
    path = blobs.local("datasets/ds_1/data.jsonl")
    assert b"half" not in path.read_bytes()
    assert (read_plain(path, staged.key), staged.sha256) == (b"half and half", sha256_of(path))
    assert staged.content_sha256 == hashlib.sha256(b"half and half").hexdigest()
    assert list((tmp_path / "scratch").iterdir()) == []
    assert blobs.names("datasets") == {"ds_1"}
    blobs.delete("datasets/ds_1")
    assert blobs.names("datasets") == set()


def test_a_killed_writer_leaves_no_final_name_and_its_rest_is_swept(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from tuneship.store.blobs import Blobs
blobs = Blobs({str(tmp_path / "blobs")!r}, Path({str(tmp_path / "scratch")!r}))
with blobs.staged() as staged:
    staged.write(b"x" * 100000)
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    blobs.keep(staged, "datasets/ds_1/data")
"""
    run = subprocess.run([sys.executable, "-c", program], check=False)
    assert run.returncode == -9
    blobs = Blobs(str(tmp_path / "blobs"), tmp_path / "scratch")
    assert not blobs.local("datasets/ds_1/data").exists()
    assert list((tmp_path / "scratch").iterdir()) != []
    blobs.sweep()
    assert list((tmp_path / "scratch").iterdir()) == []
