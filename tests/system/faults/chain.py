"""The fault matrix runs these steps of a release: each one is the real task against the real service.

A step says which request is spoiled, how often it may be tried, what must exist afterwards, and how to remove that.
"""

import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from prefect import Task, flow
from pydantic import SecretStr

from flows.rollout.endings import roll_back
from flows.rollout.record_file import RecordFolder
from flows.rollout.split import Calls, NotConfirmed, RolloutSplit
from tasks.datasets import merge_datasets, upload_dataset, validate_dataset
from tasks.deployments import create_deployment
from tasks.endpoints import get_canary_endpoint, renew_canary_lease, update_canary_endpoint
from tasks.jobs import create_job, get_job_metrics
from tasks.metrics import get_deployment_metrics
from tests.support.fakes.proxy import Proxy
from tests.support.service.in_process import Service, jsonl
from tests.system.faults.way import Nowhere, WatchedTransport, noting_client
from tuneship.client import Client
from tuneship.contract.datasets import DatasetMerge, DatasetUpload
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.endpoints import CanaryEndpointCreate, CanaryEndpointUpdate, Member
from tuneship.contract.jobs import JobCreate
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Begun
from tuneship.prefect.connection import connect, disconnect
from tuneship.prefect.waits import wait_for_job
from tuneship.settings import ClientSettings

Work = Callable[[], Any]
TAG = "cell"
ROWS = 400
HALF = 50


class OpenFlow:
    """One real flow run that executes the tasks of all cases on its own thread."""

    def __enter__(self) -> Self:
        """Start the flow run."""
        self._work: queue.Queue[tuple[Work, Future[Any]] | None] = queue.Queue()

        @flow(name="fault-cells")
        def run_cases() -> None:
            while (item := self._work.get()) is not None:
                work, future = item
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - the case that waits for the result gets the error
                    future.set_exception(error)

        # A new thread would not have the settings of the Prefect test harness.
        settings = contextvars.copy_context()
        self._thread = threading.Thread(target=settings.run, args=(run_cases,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the flow run."""
        self._work.put(None)
        self._thread.join()

    def run(self, work: Work) -> Any:
        """Run `work` inside the flow and return its result, or raise its error."""
        return self.start(work).result(600)

    def start(self, work: Work) -> Future[Any]:
        """Start `work` inside the flow without waiting for its result."""
        future: Future[Any] = Future()
        self._work.put((work, future))
        return future


class Environment:
    """The service, the proxy in front of it, and the resources that most steps need."""

    def __init__(self, service: Service, open_flow: OpenFlow, folder: Path) -> None:
        """Store the arguments; resources are created on entering."""
        self.service, self.open_flow, self.folder = service, open_flow, folder
        self.transport, self.waited = WatchedTransport(), list[float]()
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        """Create two datasets, a finished job and two deployments; send every task's requests through the proxy."""
        service, enter = self.service, self._resources.enter_context
        self.port = int(service.url.rpartition(":")[2])
        self.proxy = enter(Proxy(self.port))
        self.nowhere = enter(Nowhere())
        self.direct = enter(Client(self._settings(service.url)))
        settings = self._settings(f"http://127.0.0.1:{self.proxy.port}")
        connect(settings, noting_client(settings, self.transport, self.waited))
        self._resources.callback(disconnect)
        self.file = self.folder / "rows.jsonl"
        rows = [{"instruction": f"case {n}", "response": "chapter of it"} for n in range(ROWS)]
        self.file.write_bytes(jsonl(*rows))
        self.datasets = [service.dataset(name=f"data {n}") for n in range(2)]
        service.model()
        self.job = self.direct.jobs.list().jobs[0].id
        self.baseline, self.candidate = service.deployment("base"), service.deployment("new")
        return self

    def __exit__(self, *_: object) -> None:
        """Close the clients and the proxy."""
        self._resources.close()

    def _settings(self, url: str) -> ClientSettings:
        key = self.service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        return ClientSettings(url=url, api_key=SecretStr(key), client_id="alice")

    def split_of(self, endpoint_id: str) -> dict[str, int]:
        """Return the traffic share of each deployment, as the service reports it."""
        members = self.direct.canary_endpoints.get(endpoint_id).deployments
        return {one.id: one.traffic_percentage for one in members}


def at_once(one: Task[..., Any]) -> Task[..., Any]:
    """Return the task without Prefect's pauses between retries."""
    return one.with_options(retry_delay_seconds=0)


class Case:
    """One step under one fault; everything it creates carries `name`."""

    def __init__(self, environment: Environment, step: "Step", name: str) -> None:
        """Prepare the step and start counting its requests."""
        self.environment, self.step, self.name = environment, step, name
        # Id of the resource that the step changes, if it was created for this case alone.
        self.target = ""
        self._prepared = step.prepare(self)
        environment.transport.watch(step.method, step.path)

    def spoil(self, *faults: Any, for_ever: bool = False) -> None:
        """Apply these faults to the step's next requests, one after the other."""
        self.environment.proxy.play(self.step.method, self.step.path, faults, for_ever)

    def run(self) -> Any:
        """Run the step in the open flow; errors of its task are raised here."""
        return self.environment.open_flow.run(self._prepared)

    def heal(self) -> None:
        """Stop all faults and reset the request count."""
        self.environment.proxy.heal()
        self.environment.transport.watch(self.step.method, self.step.path)

    @property
    def tries(self) -> int:
        """Number of the step's requests since it was prepared or healed."""
        return self.environment.transport.tries

    @property
    def waited(self) -> list[float]:
        """Pauses in seconds that the client asked for; they are recorded and not waited."""
        return self.environment.waited

    @property
    def created(self) -> list[str]:
        """Ids of the resources of this case that exist at the service."""
        return self.step.created(self)


class Step:
    """A step that only reads; steps that create or change something override these defaults."""

    name = ""
    method, path = "GET", ""
    tries = 6
    # Number of tries if the answer is never JSON: the client repeats only requests that are known to be harmless.
    tries_of_spoiled = 6
    has_body = False
    is_creating = False
    # Name of the field in the answer that the step cannot do without.
    field = ""
    # Name of the field in the answer whose value may be unknown to the client; empty if there is none.
    status = "status"

    def prepare(self, case: Case) -> Work:
        """Return the function that is run in the flow."""
        raise NotImplementedError

    def created(self, case: Case) -> list[str]:
        """Return the ids of the resources that this case created at the service."""
        return []

    def clean(self, case: Case) -> None:
        """Remove the resources that this case created."""


class Validate(Step):
    name, method, path = "validate", "POST", "/v1/datasets/validate"
    has_body, tries_of_spoiled, field, status = True, 3, "is_valid", ""

    def prepare(self, case: Case) -> Work:
        return lambda: at_once(validate_dataset)(case.environment.file, "instruction").is_valid


class Upload(Step):
    name, method, path = "upload", "POST", "/v1/datasets"
    has_body, is_creating, tries_of_spoiled, field = True, True, 3, "id"

    def prepare(self, case: Case) -> Work:
        upload = DatasetUpload(name=case.name, format="instruction", tags={TAG: case.name})
        return lambda: at_once(upload_dataset)(case.environment.file, upload, case.name).id

    def created(self, case: Case) -> list[str]:
        page = case.environment.direct.datasets.list(tags={TAG: case.name})
        assert all(one.num_examples in (ROWS, 8) for one in page.datasets), "a half dataset"
        return [one.id for one in page.datasets]


class Merge(Upload):
    name, path = "merge", "/v1/datasets/merge"

    def prepare(self, case: Case) -> Work:
        merge = DatasetMerge(
            dataset_ids=case.environment.datasets, name=case.name, tags={TAG: case.name}
        )
        return lambda: at_once(merge_datasets)(merge, case.name).id


class CreateJob(Step):
    name, method, path = "create-job", "POST", "/v1/fine-tuning/jobs"
    has_body, is_creating, tries_of_spoiled, field = True, True, 3, "id"

    def prepare(self, case: Case) -> Work:
        job = JobCreate(
            base_model="tuneship-tiny",
            dataset_id=case.environment.datasets[0],
            model_name="m",
            tags={TAG: case.name},
        )
        return lambda: at_once(create_job)(job, case.name).id

    def created(self, case: Case) -> list[str]:
        return [one.id for one in case.environment.direct.jobs.list(tags={TAG: case.name}).jobs]

    def clean(self, case: Case) -> None:
        for job_id in self.created(case):
            case.environment.direct.jobs.cancel(job_id)


class PollJob(Step):
    name, path, field = "poll-job", "/v1/fine-tuning/jobs/[^/]+", "id"

    def prepare(self, case: Case) -> Work:
        return lambda: at_once(wait_for_job)(case.environment.job).id


class JobMetrics(Step):
    name, path = "job-metrics", "/v1/fine-tuning/jobs/[^/]+/metrics"
    field, status = "job_id", ""

    def prepare(self, case: Case) -> Work:
        return lambda: at_once(get_job_metrics)(case.environment.job).job_id


class CreateDeployment(Step):
    name, method, path = "create-deployment", "POST", "/v1/deployments"
    has_body, is_creating, tries_of_spoiled, field = True, True, 3, "status"

    def prepare(self, case: Case) -> Work:
        wanted = DeploymentCreate(
            model_name="tuneship-tiny", deployment_name=case.name, tags={TAG: case.name}
        )
        return lambda: at_once(create_deployment)(wanted, case.name).id

    def created(self, case: Case) -> list[str]:
        page = case.environment.direct.deployments.list(tags={TAG: case.name})
        return [one.id for one in page.deployments]

    def clean(self, case: Case) -> None:
        for deployment_id in self.created(case):
            case.environment.direct.deployments.delete(deployment_id)


class Shift(Step):
    """Change the split through `RolloutSplit`: the task sends its request once, and `RolloutSplit` checks what a lost
    answer means.
    """

    name, method, path = "shift", "PATCH", "/v1/canary-endpoints/[^/]+"
    has_body, field = True, "id"

    def prepare(self, case: Case) -> Work:
        environment = case.environment
        endpoint = environment.direct.canary_endpoints.create(
            CanaryEndpointCreate(name=case.name, deployments=members(environment, 0))
        )
        case.target = endpoint.id
        plan = CanaryPlan(
            endpoint_id=endpoint.id,
            baseline_deployment_id=environment.baseline,
            candidate_deployment_id=environment.candidate,
            look_every_seconds=0.001,
        )
        file = RecordFolder(environment.folder / "records", "http://faults").new(plan)
        file.append(
            Begun(file.path.stem, endpoint.id, plan.model_dump(mode="json"), plan.digest(), ())
        )
        calls = Calls(at_once(get_canary_endpoint), update_canary_endpoint, renew_canary_lease)
        log = logging.getLogger("tests.system.faults")
        return lambda: shifted(RolloutSplit(plan, file, endpoint.version, log, calls=calls))

    def clean(self, case: Case) -> None:
        """End the lease first, because it names the split that the endpoint would return to."""
        endpoints = case.environment.direct.canary_endpoints
        endpoints.update(
            case.target, CanaryEndpointUpdate(deployments=members(case.environment, 0))
        )
        endpoints.delete(case.target)


def shifted(split: RolloutSplit) -> str:
    """Shift half of the traffic to the candidate; if that cannot be confirmed, roll back as the flow does."""
    try:
        split.shift(HALF, "fault")
    except NotConfirmed:
        return roll_back(split, "shift_unconfirmed").outcome
    return "shifted"


def members(environment: Environment, weight: int) -> list[Member]:
    shares = {environment.baseline: 100 - weight, environment.candidate: weight}
    return [Member(id=name, traffic_percentage=share) for name, share in shares.items()]


class Look(Step):
    name, path, tries, tries_of_spoiled = "look", "/v1/deployments/[^/]+/metrics", 2, 2
    field, status = "deployment_id", ""

    def prepare(self, case: Case) -> Work:
        def look() -> str:
            return get_deployment_metrics(case.environment.baseline, interval="1m").deployment_id

        return look


STEPS: list[Step] = [
    Validate(),
    Upload(),
    Merge(),
    CreateJob(),
    PollJob(),
    JobMetrics(),
    CreateDeployment(),
    Shift(),
    Look(),
]
