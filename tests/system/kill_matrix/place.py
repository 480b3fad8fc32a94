"""Parts of the kill matrix: a service behind the holding proxy, a release with its own data, and the checks."""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.forms.release_form import ReleaseParameters
from flows.guard import guard
from flows.release.record_file import ReleaseRecords
from flows.release.result import ReleaseResult
from flows.rollout.record_file import RecordFolder
from flows.tune_and_deploy import tune_and_deploy
from flows.upkeep.guard_form import GuardRules
from tasks.create_once import RUN_TAG
from tests.support.service.engines import PlayedEngines, PlayedTrainer
from tests.support.service.processes import Serve
from tests.support.waiting import until
from tests.system.kill_matrix.gate import HoldingProxy
from tests.system.kill_matrix.prefect_place import ROOT, PrefectServer
from tuneship.client import Client
from tuneship.contract.deployments import DeploymentCreate, DeploymentStatus
from tuneship.contract.endpoints import CanaryEndpoint, CanaryEndpointCreate, Member
from tuneship.contract.evaluations import OPEN
from tuneship.contract.generation import Generate
from tuneship.contract.jobs import ENDED
from tuneship.settings import ClientSettings

ROWS, EXAMPLES = 64, 20
# Losses near the one of the simulated perplexity, which is 2.
LOSSES = (0.72, 0.71, 0.70, 0.69)
BASE_MODEL = "tuneship-tiny"
NEVER_WRONG = {"name": "any", "type": "regex", "pattern": ".", "input": "{{item.reference}}"}
AT_ONCE = GuardRules(silence_seconds=0, release_silence_hours=0)
CANARY: Mapping[str, Any] = {
    "steps": [50, 100],
    "interval": "1s",
    "look_every_seconds": 1,
    "min_looks_per_step": 1,
    "min_requests_per_step": 5,
    "bake_looks": 1,
    "settle_looks": 1,
    "lease_seconds": 600,  # longer than any case, so that no result is due to the lease
    "error_gate": {"ratio": 3.0, "harm": 0.3, "ok": 0.45},
    "latency_gates": None,
    "quality_gates": None,
}


@dataclass(frozen=True)
class ServiceSetup:
    """A service, its holding proxy, and the environment of a script that uses the proxy."""

    proxy: HoldingProxy
    # Client settings with the address of the proxy.
    settings: ClientSettings
    direct: Client
    environment: Mapping[str, str]
    prefect: PrefectServer
    # The process of the service, if the test may kill it.
    serve: Serve | None = None
    # Cleared while no training may end (with simulated workers only).
    may_train: threading.Event = field(default_factory=threading.Event)


class TrainingPlayer:
    """Simulates every training of a service as soon as `may_train` is set."""

    def __init__(self, engines: PlayedEngines, may_train: threading.Event) -> None:
        """Prepare the thread; entering starts it."""
        self._engines, self._may_train = engines, may_train
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        """Start simulating."""
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Stop simulating."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        simulated = 0
        while not self._is_over.wait(0.02):
            while simulated < len(self._engines.trainers) and self._may_train.is_set():
                _play(self._engines.trainers[simulated])
                simulated += 1


def _play(trainer: PlayedTrainer) -> None:
    if trainer.code is not None:
        return
    try:
        trainer.start_of(len(LOSSES))
        for step, loss in enumerate(LOSSES, 1):
            trainer.step(step, loss, evaluated=True)
        trainer.complete()
    except (OSError, ValueError):
        # The service has ended it meanwhile, and so closed its pipe or removed its folder.
        if trainer.code is None:
            raise


class Release:
    """One release on a service, under a unique name."""

    def __init__(self, setup: ServiceSetup, folder: Path, name: str) -> None:
        """Write rows that no other release has uploaded."""
        self.setup, self.folder, self.name = setup, folder, name
        self.records = folder / "records"
        self.result = folder / "result.json"
        rows = [
            json.dumps(
                {"instruction": f"{name}: what is case {n}?", "response": f"chapter {n % 4}"}
            )
            for n in range(ROWS + EXAMPLES)
        ]
        (folder / "rows.jsonl").write_text("\n".join(rows[:ROWS]))
        (folder / "held-out.jsonl").write_text("\n".join(rows[ROWS:]))
        traffic = {
            "prompts": str(folder / "rows.jsonl"),
            "requests_per_second": 20,
            "max_tokens": 4,
        }
        self.parameters: dict[str, Any] = {
            "model_name": name,
            "endpoint": {"name": name},
            "data": {"files": [str(folder / "rows.jsonl")]},
            "hyperparameters": {"epochs": 1, "batch_size": 8, "learning_rate": 0.001},
            "validation_frequency": 2,
            "training_gates": {"min_gain": 0.0, "min_validation_examples": 1},
            # Too few examples to decide, so that the release goes on.
            "evaluation": {
                "file": str(folder / "held-out.jsonl"),
                "graders": [NEVER_WRONG],
                "max_tokens": 4,
            },
            "canary": dict(CANARY) | {"traffic": traffic},
        }
        # Id of the deployment that served before; None for a first release.
        self.stable: str | None = None

    def serve_base_model(self) -> None:
        """Create the endpoint with a deployment of the base model that has all traffic."""
        client = self.setup.direct
        wanted = DeploymentCreate(model_name=BASE_MODEL, deployment_name=f"{self.name}-stable")
        self.stable = client.deployments.create(wanted).id
        until(lambda: client.deployments.get(str(self.stable)).status == "running")
        all_of_it = [Member(id=self.stable, traffic_percentage=100)]
        client.canary_endpoints.create(CanaryEndpointCreate(name=self.name, deployments=all_of_it))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a process that runs this release."""
        own = {"TUNESHIP_RECORDS": self.records, "TUNESHIP_REPORTS": self.folder / "reports"}
        return {**self.setup.environment, **{name: str(path) for name, path in own.items()}}

    def start(self) -> "subprocess.Popen[bytes]":
        """Start `python flows/tune_and_deploy.py`, without a shell, whose `&` would make it ignore SIGINT."""
        params = self.folder / "release.json"
        params.write_text(json.dumps(self.parameters))
        script = [str(ROOT / "flows" / "tune_and_deploy.py"), "--params", str(params)]
        with (self.folder / "said.txt").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, *script, "--result", str(self.result)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    @property
    def outcome(self) -> str:
        """Outcome of the last run according to its record; empty if it was killed."""
        ended = [record.last("ended") for record in ReleaseRecords(self.records)]
        return str(ended[-1]["outcome"]) if ended and ended[-1] else ""

    @property
    def said(self) -> str:
        """The last output of the processes of this release."""
        file = self.folder / "said.txt"
        return file.read_text(errors="replace")[-4000:] if file.is_file() else "nothing"

    def run_again(self) -> ReleaseResult:
        """Run the release again with the same parameters, in this process."""
        return tune_and_deploy(ReleaseParameters.model_validate_json(json.dumps(self.parameters)))

    def guard_until_closed(self) -> None:
        """Run the guard repeatedly, as its schedule does, until all runs are closed."""

        def is_closed() -> bool:
            guard(AT_ONCE)
            return all(record.has_ended for record in ReleaseRecords(self.records))

        until(is_closed)

    # -- checks --

    @property
    def run_keys(self) -> list[str]:
        """Keys of every run of this release."""
        return [record.run_key for record in ReleaseRecords(self.records)]

    @property
    def endpoint(self) -> CanaryEndpoint | None:
        """The endpoint as the service reports it."""
        return next(
            iter(self.setup.direct.canary_endpoints.list(name=self.name).canary_endpoints), None
        )

    @property
    def shares(self) -> dict[str, int]:
        """The split without deployments that have no share."""
        members = self.endpoint.deployments if self.endpoint else []
        return {one.id: one.traffic_percentage for one in members if one.traffic_percentage}

    def alive(self, run_key: str) -> list[str]:
        """Return the deployments of a run that are neither deleted nor being deleted."""
        found = self.setup.direct.deployments.iterate(tags={RUN_TAG: run_key})
        return [one.id for one in found if one.status != DeploymentStatus.DELETING]

    def check_made(self) -> None:
        """Check for at most one job per run key and one deployment per role, deleted ones included."""
        client = self.setup.direct
        for key in self.run_keys:
            tags = {RUN_TAG: key}
            assert len(list(client.jobs.iterate(tags=tags))) <= 1
            assert len(list(client.evaluations.iterate(tags=tags))) <= 1
            live = client.deployments.iterate(tags=tags)
            made = {one.id: one.deployment_name for one in live}
            gone = client.deployments.iterate(tags=tags, status=DeploymentStatus.DELETED)
            # A deleted one may have been among the live ones just before.
            made |= {one.id: one.deployment_name for one in gone}
            roles = list(made.values())
            assert len(roles) == len(set(roles)), roles
            assert len(roles) <= (1 if self.stable else 2)

    def check_serving(self) -> None:
        """Check that the split sums to 100 over running deployments and that one of them answers a request."""
        shares, client = self.shares, self.setup.direct
        if self.endpoint is None:
            assert self.stable is None
            return
        assert sum(shares.values()) == 100
        for one in shares:
            assert client.deployments.get(one).status == "running"
        answer = client.canary_endpoints.generate(
            self.endpoint.id, Generate(prompt="which chapter?", max_tokens=4)
        )
        assert answer.deployment_id in shares

    def check_at_rest(self, serving: str | None) -> None:
        """Check that all has ended: `serving` has all traffic, and nothing else of these runs is alive."""
        self.check_made()
        self.check_serving()
        assert list(self.shares) == ([serving] if serving else [])
        assert self.endpoint is None or self.endpoint.lease is None
        for key in self.run_keys:
            assert set(self.alive(key)) <= {serving}
            jobs = self.setup.direct.jobs.iterate(tags={RUN_TAG: key})
            assert all(one.status in (*ENDED, "cancelling") for one in jobs)
        assert all(record.has_ended for record in ReleaseRecords(self.records))
        evaluations = self.setup.direct.evaluations
        for key in self.run_keys:
            for one in evaluations.iterate(tags={RUN_TAG: key}):
                # It ends with its candidate's deployment, if nothing else ends it.
                until(lambda one=one: evaluations.get(one.id).status not in OPEN)
        folder = RecordFolder(self.records, self.setup.settings.url)
        assert not any(folder.file(path.stem).is_open for path in folder.paths())

    def check_given_back(self) -> None:
        """Check that all is as before the release; a first one may leave its endpoint with the base model."""
        if self.stable is not None:
            self.check_at_rest(self.stable)
            return
        serving = next(iter(self.shares), None)
        assert (
            serving is None or self.setup.direct.deployments.get(serving).model_name == BASE_MODEL
        )
        self.check_at_rest(serving)

    def check_promoted(self, outcome: str, reason: str = "") -> None:
        """Check that the release was promoted: its candidate serves, and the previous deployment is retired."""
        assert outcome == "promoted", f"{outcome}, {reason}: {self.said}"
        candidate = next(iter(self.shares))
        model = self.setup.direct.deployments.get(candidate).model_name
        assert model.startswith("ft:"), model
        self.check_at_rest(candidate)
