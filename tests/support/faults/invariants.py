"""Checks of the database and the files that must pass after every fault.

`check_settled` is for a service that has finished its work: no job is active, no deployment is changing, and no webhook
is due.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.support.objects.files import paths_below
from tuneship.contract.datasets import DatasetStatus
from tuneship.contract.deployments import MOVES as DEPLOYMENT_MOVES
from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.endpoints import EndpointStatus
from tuneship.contract.jobs import ALIVE, ENDED, JobStatus
from tuneship.contract.openai.batches import OPEN
from tuneship.store.database import tables
from tuneship.store.database.rows import Row
from tuneship.store.records import audit
from tuneship.store.records.audit import Chain
from tuneship.store.records.batch_records import PARTS

END_EVENTS = {"completed": "succeeded", "failed": "failed", "cancelled": "cancelled"}


def rows_of(connection: sa.Connection, table: sa.Table) -> list[Row]:
    return [dict(row) for row in connection.execute(sa.select(table)).mappings()]


def events_by_resource(connection: sa.Connection, *where: Any) -> Mapping[str, Sequence[Row]]:
    """Return all events by resource, in order, and check that each resource's numbers have no gap or duplicate."""
    found: defaultdict[str, list[Row]] = defaultdict(list)
    query = sa.select(tables.events).where(*where).order_by(tables.events.c.position)
    for row in connection.execute(query).mappings():
        found[row["resource_id"]].append(dict(row))
    for recorded in found.values():
        assert [one["sequence"] for one in recorded] == list(range(1, len(recorded) + 1))
    return found


def check_job_events(status: str, recorded: Sequence[Row]) -> None:
    """Check that a job is queued first, started at most once, and has exactly one final event if it has ended."""
    kinds = [one["type"].rpartition(".")[2] for one in recorded]
    assert kinds[0] == "queued"
    assert kinds.count("queued") == 1
    assert kinds.count("started") <= 1
    ends = [kind for kind in kinds if kind in END_EVENTS.values()]
    assert ends == ([END_EVENTS[status]] if status in ENDED else [])
    assert not ends or kinds[-1] == ends[0]


def check_moves(recorded: Sequence[Row]) -> None:
    """Check that a deployment's states form a path through the declared graph."""
    moves = [one["data"] for one in recorded if one["type"].endswith("status_changed")]
    for move in moves:
        assert move["to"] in DEPLOYMENT_MOVES[move["from"]]
    for before, after in pairwise(moves):
        assert before["to"] == after["from"]


def check_rows(connection: sa.Connection) -> None:
    """Check that exactly the completed jobs have a model, shares add up to 100, and states agree with events."""
    recorded = events_by_resource(connection)
    models = [one["job_id"] for one in rows_of(connection, tables.models)]
    jobs = rows_of(connection, tables.jobs)
    assert sorted(models) == sorted(one["id"] for one in jobs if one["status"] == "completed")
    for job in jobs:
        assert (job["completed_at"] is not None) == (job["status"] == JobStatus.COMPLETED)
        check_job_events(job["status"], recorded[job["id"]])
    for one in rows_of(connection, tables.deployments):
        check_moves(recorded[one["id"]])
        moves = [event for event in recorded[one["id"]] if event["type"].endswith("status_changed")]
        assert one["status"] == (moves[-1]["data"]["to"] if moves else DeploymentStatus.CREATING)
    for one in rows_of(connection, tables.datasets):
        kinds = [event["type"] for event in recorded[one["id"]]]
        ended = {"processed": ["dataset.processed"], "failed": ["dataset.failed"]}
        assert kinds == ["dataset.uploaded", *ended.get(one["status"], [])]
    _check_splits(connection)


def _check_splits(connection: sa.Connection) -> None:
    known = {one["id"] for one in rows_of(connection, tables.deployments)}
    for one in rows_of(connection, tables.endpoints):
        if one["status"] == EndpointStatus.ACTIVE:
            shares = [member["traffic_percentage"] for member in one["members"]]
            assert all(type(share) is int and share >= 0 for share in shares)
            assert sum(shares) == 100
            assert {member["id"] for member in one["members"]} <= known


def check_at_rest(connection: sa.Connection) -> None:
    """Check that no work is in progress."""
    jobs, datasets = rows_of(connection, tables.jobs), rows_of(connection, tables.datasets)
    assert not [one["id"] for one in jobs if one["status"] in ALIVE]
    assert not [one for one in rows_of(connection, tables.batches) if one["status"] in OPEN]
    assert not [one for one in datasets if one["status"] == DatasetStatus.PROCESSING]
    settled = {DeploymentStatus.RUNNING, DeploymentStatus.FAILED, DeploymentStatus.DELETED}
    assert {one["status"] for one in rows_of(connection, tables.deployments)} <= settled


def check_settled(connection: sa.Connection, data_dir: Path) -> None:
    """Check that no work is in progress, and that stored files and rows match, with no temporary files left."""
    check_at_rest(connection)
    assert not [one for one in rows_of(connection, tables.idempotency) if one["body"] is None]
    assert _names(data_dir / "blobs" / "datasets") == {
        one["id"] for one in rows_of(connection, tables.datasets)
    }
    models = {Path(one["blob"]).name for one in rows_of(connection, tables.models)}
    assert _names(data_dir / "blobs" / "models") == models
    files = rows_of(connection, tables.batch_files)
    assert _names(data_dir / "blobs" / "files") == {one["id"] for one in files}
    assert not [one for one in files if one["purpose"] in PARTS]
    assert _names(data_dir / "work") == set()
    assert not [one for one in paths_below(data_dir) if one.name.startswith((".tmp", ".staged"))]


def _names(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()} if folder.is_dir() else set()


def check_audit(connection: sa.Connection, chain: Chain, answers: Mapping[str, int]) -> None:
    """Check that the audit chain verifies and has at least as many rows per resource as `answers` says."""
    assert chain.fault(audit.rows_of(connection)) is None
    assert chain.unlinked(connection).forged == 0
    rows = [*rows_of(connection, tables.audit), *rows_of(connection, tables.unlinked_audit)]
    for resource, number in answers.items():
        assert sum(row["resource_id"] == resource for row in rows) >= number


def check_reported(connection: sa.Connection, received: Collection[str]) -> None:
    """Check that a receiver subscribed to all events got each of them at least once, under its id."""
    events = {one["id"] for one in rows_of(connection, tables.events)}
    delivered = [one for one in rows_of(connection, tables.deliveries) if one["attempts"] > 0]
    assert {one["event_id"] for one in delivered} == events
    assert {one["status"] for one in delivered} <= {"delivered"}
    assert set(received) >= events


def read_history(file: Path) -> list[dict[str, Any]]:
    """Read the entries of a history; a missing file has none."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
