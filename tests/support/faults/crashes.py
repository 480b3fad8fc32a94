"""The points at which tests kill a service, and a program that runs services which kill themselves there by SIGKILL.

A point is armed from outside, by replacing a function of the product with one that kills the process at its n-th call.
The services are children of one process, so that Python and its modules are loaded once. Each line of
standard input is an order, as JSON with the fields of `Order`; the answer is `killed`. `system/test_crash_points.py`
starts it and checks the data that is left.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import alembic.op
import sqlalchemy as sa

from tests.support.faults.crash_lives import (
    Changed,
    Death,
    Order,
    Tenant,
    _exchange,
    accepts,
    answers,
    deploys,
    fetches,
    grades,
    imports,
    merges,
    opens,
    removes,
    shifts,
    tells,
    trains,
    uploads,
)
from tests.support.service.engines import PlayedEngines
from tests.support.service.in_process import Service
from tuneship.contract.evaluations import EvaluationStatus
from tuneship.contract.openai.batches import BatchStatus
from tuneship.events.attempt import Sender
from tuneship.service.all_handlers import SERVED
from tuneship.service.batches.stored_answers import BatchStore
from tuneship.service.context.context import Context
from tuneship.service.datasets import merging as dataset_merging
from tuneship.service.deployments.deployment_keeper import DeploymentKeeper
from tuneship.service.evaluations.evaluation_run import EvaluationRun, EvaluationStore
from tuneship.service.jobs.local_launcher import LocalTrainingLauncher
from tuneship.service.jobs.training_keeper import TrainingKeeper
from tuneship.store.database import rows, tables
from tuneship.store.files.blobs import StagedFile
from tuneship.store.files.local_blobs import LocalBlobs
from tuneship.store.records import (
    batch_records,
    endpoint_records,
    evaluation_records,
    idempotency,
    job_leases,
    webhook_records,
)
from tuneship.store.records.audit import Chain
from tuneship.training import checkpoints


@dataclass(frozen=True)
class Point:
    """A point that `arm` makes deadly; the work `life` then passes it at least twice."""

    life: Callable[[Tenant, Death], None]
    arm: Callable[[Death], None]


def _handler(death: Death, operation: str, side: str) -> None:
    getattr(death, side)(SERVED[operation], "handler")


def _is_model(_result: object, _connection: object, table: sa.Table, *_: object) -> bool:
    return table is tables.models


def _was_counted(result: bool, *_: object, **__: object) -> bool:
    return result


def _becomes(status: str) -> Changed:
    return lambda *_, **changes: changes.get("status") == status


def _written_in_half(death: Death) -> None:
    """Count a pass when half of a block has been written to the file."""
    write = StagedFile.write

    def half(file: StagedFile, block: Any) -> None:
        write(file, block[: len(block) // 2])
        death.passed()
        write(file, block[len(block) // 2 :])

    _exchange(StagedFile, "write", half)


def _in_the_library(death: Death, side: str, name: str) -> None:
    """Count a pass before or after each call of this name by which the service uses its bucket."""
    from tuneship.store.files import (
        object_blobs,  # only who keeps files in a bucket needs the library
    )

    getattr(death, side)(object_blobs.obstore, name)


def _between_parts(death: Death) -> None:
    """Count a pass when the first parts of a large file are on their way, and others are not read yet."""
    from tuneship.store.files.object_blobs import PART_BYTES, ObjectBlobs

    upload = ObjectBlobs._upload

    def counted(blocks: Iterator[bytes]) -> Iterator[bytes]:
        read = 0
        for block in blocks:
            if read <= 2 * PART_BYTES < read + len(block):
                death.passed()
            read += len(block)
            yield block

    def deadly(blobs: ObjectBlobs, key: str, content: Any) -> None:
        upload(blobs, key, counted(content) if isinstance(content, Iterator) else content)

    _exchange(ObjectBlobs, "_upload", deadly)


def _half_fetched(death: Death) -> None:
    """Count a pass when half of a file has been downloaded."""
    from tuneship.store.files.object_blobs import ObjectBlobs

    blocks = ObjectBlobs._blocks

    def halved(blobs: ObjectBlobs, key: str) -> Iterator[bytes]:
        for block in blocks(blobs, key):
            yield block[: len(block) // 2]
            if key.startswith("datasets/"):
                death.passed()
            yield block[len(block) // 2 :]

    _exchange(ObjectBlobs, "_blocks", halved)


# The points of a service that keeps its files in a bucket.
OBJECT_POINTS = {
    "object: before its PUT": Point(uploads, lambda one: _in_the_library(one, "before", "put")),
    "object: after its PUT, before the row": Point(
        uploads, lambda one: _in_the_library(one, "after", "put")
    ),
    "object: after the row, before the commit": Point(
        uploads, lambda one: _handler(one, "upload_dataset", "after")
    ),
    "object: between the parts of a PUT": Point(imports, _between_parts),
    "object: after the commit, before it is deleted": Point(
        removes, lambda one: _in_the_library(one, "before", "delete")
    ),
    "object: half fetched": Point(fetches, _half_fetched),
}
# The points of an evaluation. Its first one has four parts at least, as a part has at most 128 examples of 400.
EVALUATION_POINTS = {
    "evaluation: before it runs": Point(
        grades,
        lambda one: one.before(EvaluationStore, "change", _becomes(EvaluationStatus.RUNNING)),
    ),
    "evaluation: inside the tx of a part": Point(
        grades, lambda one: one.after(evaluation_records, "advance", _was_counted)
    ),
    "evaluation: after the commit of a part": Point(
        grades, lambda one: one.after(EvaluationRun, "_keep")
    ),
    "evaluation: all stored, before the end": Point(
        grades, lambda one: one.before(EvaluationRun, "_finish")
    ),
    "evaluation: inside the tx of the end": Point(
        grades,
        lambda one: one.after(evaluation_records, "move", _becomes(EvaluationStatus.COMPLETED)),
    ),
    "evaluation: after its end": Point(grades, lambda one: one.after(EvaluationRun, "_finish")),
}
POINTS = (
    OBJECT_POINTS
    | EVALUATION_POINTS
    | {
        "accept: before the key": Point(accepts, lambda one: one.before(idempotency, "begin")),
        "accept: while the key is taken": Point(
            accepts, lambda one: one.after(idempotency, "begin")
        ),
        "accept: before tx": Point(accepts, lambda one: _handler(one, "create_job", "before")),
        "accept: inside tx": Point(accepts, lambda one: _handler(one, "create_job", "after")),
        "accept: before the commit": Point(accepts, lambda one: one.before(Context, "commit")),
        "accept: after commit, before the answer": Point(
            accepts, lambda one: one.after(Context, "commit")
        ),
        "upload: mid-file": Point(uploads, _written_in_half),
        "upload: after rename, before the row": Point(
            uploads, lambda one: one.after(LocalBlobs, "keep")
        ),
        "upload: after the row": Point(
            uploads, lambda one: _handler(one, "upload_dataset", "after")
        ),
        "upload: after commit, before the answer": Point(
            uploads, lambda one: one.after(Context, "commit")
        ),
        "merge: mid-write": Point(merges, lambda one: one.after(dataset_merging, "_append")),
        "claim: after commit": Point(
            trains, lambda one: one.after(TrainingKeeper, "_claim", lambda job, *_: job is not None)
        ),
        "train: after spawn": Point(trains, lambda one: one.after(LocalTrainingLauncher, "_spawn")),
        "train: mid-epoch": Point(trains, lambda _: None),
        "train: mid-checkpoint tmp": Point(
            trains, lambda one: one.after(checkpoints, "write_sealed")
        ),
        "train: after checkpoint rename": Point(
            trains, lambda one: one.after(checkpoints, "make_directory")
        ),
        "train: before finish CAS": Point(trains, lambda one: one.before(job_leases, "end")),
        "train: after finish CAS": Point(
            trains, lambda one: one.before(LocalTrainingLauncher, "clear")
        ),
        "model register": Point(trains, lambda one: one.after(rows, "insert", _is_model)),
        "deployment: after the row": Point(deploys, lambda one: one.after(Context, "commit")),
        "deployment: after spawn": Point(deploys, lambda one: one.after(PlayedEngines, "start")),
        "deployment: before ready CAS": Point(
            deploys, lambda one: one.before(DeploymentKeeper, "_change", _becomes("running"))
        ),
        "deployment: deleting, after stop, before the row": Point(
            deploys, lambda one: one.before(DeploymentKeeper, "_change", _becomes("deleted"))
        ),
        "canary: inside swap": Point(shifts, lambda one: one.after(endpoint_records, "swap")),
        "batch: after a commit of its client": Point(
            answers, lambda one: one.after(Context, "commit")
        ),
        "batch: after the check, before its row": Point(
            answers,
            lambda one: one.before(BatchStore, "change_state", _becomes(BatchStatus.IN_PROGRESS)),
        ),
        "batch: answers in a file, before they count": Point(
            answers, lambda one: one.before(batch_records, "advance")
        ),
        "batch: inside the tx that counts answers": Point(
            answers, lambda one: one.after(batch_records, "advance", _was_counted)
        ),
        "batch: after the commit of answers": Point(
            answers, lambda one: one.after(BatchStore, "store")
        ),
        "batch: files made, before the end": Point(
            answers, lambda one: one.before(batch_records, "move", _becomes(BatchStatus.COMPLETED))
        ),
        "batch: ended, before its parts are removed": Point(
            answers, lambda one: one.before(LocalBlobs, "delete")
        ),
        "outbox: before send": Point(tells, lambda one: one.before(Sender, "send")),
        "outbox: after send, before mark": Point(
            tells, lambda one: one.before(webhook_records, "record_success")
        ),
        "audit: before commit": Point(accepts, lambda one: one.after(Chain, "add")),
        "migration: mid": Point(opens, lambda one: one.after(alembic.op, "create_index")),
    }
)


def play(order: Order) -> None:
    """Run a service in a child process, until it passes its point for the n-th time."""
    os.environ.update(order.environment)
    point = POINTS[order.point]
    death = Death(order.number, order.point, point.arm)
    if point.life is opens:
        death.arm()
    with Service(Path(order.folder), **order.settings) as service:
        hook = {"url": order.receiver, "events": ["*"]}
        assert service.call("POST", "/v1/webhooks", json=hook).status_code == 201
        point.life(Tenant(service, Path(order.folder)), death)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            play(Order(**json.loads(line)))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print("killed" if is_killed else f"lived: {status}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
