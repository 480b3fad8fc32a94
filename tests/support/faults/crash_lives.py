"""The work of a tenant at a service that is killed meanwhile, and that death; its points are in `crashes.py`."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.support.models.conversion import ADAPTER
from tests.support.objects.files import tar_of
from tests.support.openai.batches import AT_ONCE
from tests.support.service.engines import PlayedTrainer
from tests.support.service.evaluations import PlayedAnswers
from tests.support.service.in_process import LINES, Service, jsonl, split
from tuneship.service.all_handlers import SERVED
from tuneship.service.background_requests.background_run import BackgroundTiming
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
    """Kills the process at the n-th pass of the point `place`, which `make_deadly` arms."""

    def __init__(self, number: int, place: str, make_deadly: Callable[["Death"], None]) -> None:
        self._left = number
        self._place = place
        self._make_deadly = make_deadly

    def arm(self) -> None:
        """Start to count passes."""
        self._make_deadly(self)

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
