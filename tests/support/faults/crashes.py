"""The points at which tests kill a service, and a program that runs services which kill themselves there by SIGKILL.

A point is armed from outside, by replacing a function of the product with one that kills the process at its n-th call.
The services are children of one process, so that Python and its modules are loaded once. Each line of
standard input is an order, as JSON with the fields of `Order`; the answer is `killed`. `system/test_crash_points.py`
starts it and checks the data that is left.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import alembic.op
import httpx
import sqlalchemy as sa
import torch

from tests.support.models.conversion import ADAPTER
from tests.support.objects.files import tar_of
from tests.support.openai.batches import AT_ONCE
from tests.support.service.engines import PlayedEngines, PlayedTrainer
from tests.support.service.evaluations import PlayedAnswers
from tests.support.service.in_process import LINES, Service, jsonl, split
from tuneship.contract.evaluations import EvaluationStatus
from tuneship.contract.openai.batches import BatchStatus
from tuneship.events.attempt import Sender
from tuneship.service.all_handlers import SERVED
from tuneship.service.background_requests.background_run import BackgroundTiming
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

# A file in the data folder that lists every requested change, followed by the answer.
HISTORY = "history.jsonl"
Changed = Callable[..., bool]
DATASETS, FILES, BATCHES = "/v1/datasets", "/openai/v1/files", "/openai/v1/batches"
MODELS = "/v1/models"
# The size of an adapter that goes to a bucket in several parts.
LARGE_BYTES = 12 << 20
# Of 64 examples, as a service stores them that answers slowly.
PARTS = BackgroundTiming(soon_s=0, enough=128)
# Evaluations of a worse model: one scores all examples, and the other ends early.
EVALUATED: Mapping[str, bool] = {"whole": False, "early": True}
# The names of the requests of every batch.
BATCHED = [f"request {number}" for number in range(6)]


@dataclass(frozen=True)
class Order:
    """An order to kill a service at the `number`-th pass of `point`.

    `url`: of the database, "" for SQLite in `folder`. `receiver`: the address to which webhooks are sent.
    `bucket`: where the files are kept, "" for `folder`; `environment` has its credentials.
    """

    point: str
    number: int
    folder: str
    url: str
    receiver: str
    bucket: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the service that is killed and of the one that continues after it."""
        local = {"webhook_allow_cidrs": ["127.0.0.0/8"], "webhook_allow_http_hosts": ["127.0.0.1"]}
        places = {"database_url": self.url, "blob_url": self.bucket}
        return local | {name: value for name, value in places.items() if value}


class Tenant:
    """A client for the tenant Alice that records each request and each answer in a file."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service = service
        self._file = folder / HISTORY

    def ask(self, method: str, path: str, key: str, **options: Any) -> dict[str, Any]:
        """Send a change with an `Idempotency-Key`."""
        self._write({"kind": "asked", "request": [method, path, key], "body": options.get("json")})
        answer = send(self.service, method, path, key, **options)
        assert answer.status_code < 300, answer.text
        self._write({"kind": "answered", "key": key, "status": answer.status_code} | answer.json())
        return answer.json()

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def upload(self, key: str) -> str:
        return self.ask("POST", DATASETS, key)["id"]

    def import_large(self, key: str) -> str:
        return self.ask("POST", MODELS, key)["id"]

    def batch(self, key: str) -> str:
        body = {
            "input_file_id": self.ask("POST", FILES, f"file of {key}")["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        return self.ask("POST", BATCHES, key, json=body)["id"]

    def job(self, key: str, dataset: str) -> str:
        body = {"base_model": "tuneship-tiny", "dataset_id": dataset, "model_name": key}
        return self.ask("POST", "/v1/fine-tuning/jobs", key, json=body)["id"]

    def deploy(self, key: str) -> str:
        body = {"model_name": "tuneship-tiny", "deployment_name": key}
        return self.ask("POST", "/v1/deployments", key, json=body)["id"]

    def runs(self, deployment: str) -> str:
        self.service.until(lambda: self.service.deployment_status(deployment) == "running")
        return deployment


def send(service: Service, method: str, path: str, key: str, **options: Any) -> httpx.Response:
    """Send a request; if a kill interrupts it, the test repeats it by the same call."""
    if path == DATASETS:
        options = {"data": {"name": "d", "format": "instruction"}}
        options["files"] = {"file": ("x", jsonl(*LINES))}
    if (method, path) == ("POST", MODELS):
        large = tar_of({**ADAPTER, "adapter_model.safetensors": b"w" * LARGE_BYTES})
        options = {"data": {"name": "large"}}
        options["files"] = {"file": ("x", large, "application/x-tar")}
    if path == FILES:
        options = {"data": {"purpose": "batch"}}
        options["files"] = {"file": ("x", jsonl(*map(_batched, BATCHED)))}
    return service.call(method, path, headers={"Idempotency-Key": key}, **options)


def _batched(name: str) -> dict[str, Any]:
    body = {"model": "tuneship-tiny", "prompt": name}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


class Death:
    """Kills the process at the n-th pass of the point `place`."""

    def __init__(self, number: int, place: str) -> None:
        self._left = number
        self._place = place

    def arm(self) -> None:
        """Start to count passes."""
        POINTS[self._place].arm(self)

    def passed(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def at(self, place: str) -> None:
        """Count a pass if this is the point; for points that lie in the test's own code."""
        if place == self._place:
            self.passed()

    def before(self, owner: Any, name: str, when: Changed = lambda *_, **__: True) -> None:
        """Count a pass before each call of `owner.name` whose arguments satisfy `when`."""
        work = getattr(owner, name)

        def deadly(*given: Any, **named: Any) -> Any:
            if when(*given, **named):
                self.passed()
            return work(*given, **named)

        _exchange(owner, name, deadly)

    def after(self, owner: Any, name: str, when: Changed = lambda *_, **__: True) -> None:
        """Count a pass after each call of `owner.name` whose result and arguments satisfy `when`."""
        work = getattr(owner, name)

        def deadly(*given: Any, **named: Any) -> Any:
            result = work(*given, **named)
            if when(result, *given, **named):
                self.passed()
            return result

        _exchange(owner, name, deadly)


def _exchange(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, even of an operation, which is a frozen dataclass."""
    change = object.__setattr__ if owner in SERVED.values() else setattr
    change(owner, name, value)


# The work that the services do


def accepts(tenant: Tenant, death: Death) -> None:
    dataset = tenant.service.dataset()
    death.arm()
    tenant.job("one", dataset)
    tenant.job("two", dataset)


def uploads(tenant: Tenant, death: Death) -> None:
    death.arm()
    tenant.upload("one")
    tenant.upload("two")


def merges(tenant: Tenant, death: Death) -> None:
    body = {"dataset_ids": [tenant.upload("one"), tenant.upload("two")], "name": "m"}
    death.arm()
    tenant.ask("POST", "/v1/datasets/merge", "merged", json=body)


def trains(tenant: Tenant, death: Death) -> None:
    """Train two jobs, one after the other, each with two real checkpoints."""
    service, dataset = tenant.service, tenant.upload("data")
    death.arm()
    for number, key in enumerate(("one", "two")):
        job = tenant.job(key, dataset)
        trainer: PlayedTrainer = service.trainer(number)
        trainer.start_of(4)
        kept = checkpoints.Checkpoints(trainer.folder.parent / "checkpoints", job)
        for step in (1, 2):
            trainer.step(step)
            service.until(lambda job=job, step=step: _step_of(service, job) == step)
            death.at("train: mid-epoch")
            kept.save(step, {"step": step}, {"weights": torch.full((4,), float(step))})
        trainer.complete(end=number == 0)  # the model also counts while its process still runs
        service.until(lambda job=job: service.job_status(job) == "completed")


def _step_of(service: Service, job: str) -> int:
    return service.call("GET", f"/v1/fine-tuning/jobs/{job}").json()["current_step"]


def deploys(tenant: Tenant, death: Death) -> None:
    """Make two deployments, lose their replica, wait for the new one, and delete both deployments."""
    service = tenant.service
    death.arm()
    made = [tenant.deploy("one"), tenant.deploy("two")]
    for one in made:
        tenant.runs(one)
    service.engines.replicas[0].kill()
    service.until(lambda: len(service.engines.replicas) == 2)
    for one in made:
        tenant.ask("DELETE", f"/v1/deployments/{one}", f"delete {one}")
        service.until(lambda one=one: service.deployment_status(one) == "deleted")


def shifts(tenant: Tenant, death: Death) -> None:
    one, two = (tenant.runs(tenant.deploy(name)) for name in ("one", "two"))
    death.arm()
    body = split({one: 100, two: 0}, name="c")
    made = tenant.ask("POST", "/v1/canary-endpoints", "canary", json=body)["id"]
    for share in (50, 5):
        body = split({one: share, two: 100 - share})
        tenant.ask("PATCH", f"/v1/canary-endpoints/{made}", f"shift {share}", json=body)


def tells(tenant: Tenant, death: Death) -> None:
    death.arm()
    tenant.service.start_deliveries()
    tenant.upload("one")
    tenant.service.until(lambda: False)  # the service is killed by the delivery


def answers(tenant: Tenant, death: Death) -> None:
    """Have two batches answered, one after the other, and each answer stored as soon as it may be."""
    service = tenant.service
    service.supervisor.leader_work.batches.timing = AT_ONCE
    tenant.runs(tenant.deploy("answers"))
    death.arm()
    for key in ("one", "two"):
        path = f"{BATCHES}/{tenant.batch(key)}"
        service.until(lambda path=path: service.call("GET", path).json()["status"] == "completed")


def grades(tenant: Tenant, death: Death) -> None:
    """Have two evaluations answered, one after the other."""
    played = played_models(tenant.service).set_up()
    death.arm()
    for name, stop_early in EVALUATED.items():
        played.ended(played.create(name=name, stop_early=stop_early, slice_by=["site"]))


def played_models(service: Service) -> PlayedAnswers:
    """Models that answer alike in every service, whose scores are stored in large parts."""
    service.supervisor.leader_work.evaluations.timing = PARTS
    played = PlayedAnswers(service)
    played.base_fails, played.tuned_fails = range(40), range(0, 400, 3)
    return played


def imports(tenant: Tenant, death: Death) -> None:
    death.arm()
    tenant.import_large("one")
    tenant.import_large("two")


def removes(tenant: Tenant, death: Death) -> None:
    made = [tenant.upload("one"), tenant.upload("two")]
    death.arm()
    for one in made:
        tenant.ask("DELETE", f"{DATASETS}/{one}", f"delete {one}")


def fetches(tenant: Tenant, death: Death) -> None:
    """Merge two datasets of which there are no local copies any more."""
    made = [tenant.upload("one"), tenant.upload("two")]
    for one in made:
        shutil.rmtree(tenant.service.parts.blobs.path_of(f"datasets/{one}"))
    death.arm()
    body = {"dataset_ids": made, "name": "m"}
    tenant.ask("POST", f"{DATASETS}/merge", "merged", json=body)


def opens(tenant: Tenant, death: Death) -> None:
    """Do no work: the service is killed when it opens its database."""


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
    point, death = POINTS[order.point], Death(order.number, order.point)
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
