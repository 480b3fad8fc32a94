"""A leader that stood still while it stored a finished model changes nothing of the model that the next one made."""

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.cluster.members import standing_still
from tests.support.service.in_process import ANSWER, Service
from tests.support.waiting import until
from tuneship.host.file_digest import sha256_of
from tuneship.store.database import tables
from tuneship.store.records.job_leases import LEASE

pytestmark = pytest.mark.postgres


def test_the_files_of_a_late_attempt_lie_beside_those_of_the_next(
    lapsing: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = lapsing
    stores, goes_on = threading.Event(), threading.Event()
    put = leader.parts.blobs.put

    def slow(path: Path, key: str) -> str:
        """Stand still before the first file, as a leader does whose machine sleeps."""
        stores.set()
        goes_on.wait()
        return put(path, key)

    monkeypatch.setattr(leader.parts.blobs, "put", slow)
    job_id = other.job()
    trainer = leader.trainer()
    trainer.start_of(2)
    trainer.complete()
    stores.wait()
    with standing_still(leader):
        until(lambda: other.leadership.leads)
        for member in lapsing:
            member.clock.ahead += LEASE
        again = other.trainer()
        again.start_of(2)
        again.complete()
        until(lambda: other.job_status(job_id) == "completed")
        goes_on.set()
        late = leader.parts.blobs.path_of(f"models/{job_id}-1")
        until(lambda: len([*late.glob("*")]) == 3)
    with other.database.read() as connection:
        (row,) = connection.execute(sa.select(tables.models)).mappings()
    files = other.parts.blobs.path_of(row["blob"])
    assert {file.name: sha256_of(file) for file in files.iterdir()} == row["sha256"]
    assert {sha256_of(file) for file in late.iterdir()}.isdisjoint(row["sha256"].values())
    deployment = other.deployment("d", model_name=row["id"])
    answer = other.call("POST", f"/v1/deployments/{deployment}/generate", json={"prompt": "case 1"})
    assert answer.json()["completion"] == ANSWER
