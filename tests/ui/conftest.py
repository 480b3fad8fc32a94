"""What the tests in a browser share: the machine of `make up`, whose flows work with a service that plays its engines.

Worker, Prefect server and service are real; a release takes seconds because nothing is computed. Every text of a
patient that goes in holds `SECRET`, so that no page may show it.
"""

import json
import math
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import PlayedTrainer
from tests.support.in_process import ANSWER, Service
from tests.support.local_machine import Machine
from tests.ui.browser import PROGRAMS, Browser

SECRET = "Q7-planted-patient-text"
SECRETS = (SECRET, ANSWER)
"""Prompts and their references; what the models answer."""
RETRAIN = "retrain-weekly"
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
RUN_PATIENCE_S = 600.0
STEPS = 8
QUICK: dict[str, Any] = {
    "steps": [50, 100],
    "interval": "1s",
    "look_every_seconds": 1.0,
    "min_looks_per_step": 2,
    "max_looks_per_step": 600,  # for as many requests as are needed, however slowly they come
    "max_looks": 1800,
    "bake_looks": 2,
    "lease_seconds": 120,
    "latency_gates": None,  # a machine that tests is a busy one
}
"""A rollout of seconds."""


@dataclass
class Pace:
    """How far a training may go."""

    step: int = STEPS


@dataclass(frozen=True)
class World:
    """The machine, the service that its flows use, and files for them."""

    machine: Machine
    service: Service
    folder: Path
    pace: "Pace"

    @property
    def ui(self) -> str:
        """Where the UI's pages are."""
        return self.machine.prefect.removesuffix("/api")

    def deployment(self, name: str) -> dict[str, Any]:
        """A flow as it is registered."""
        flow = "retrain" if name == RETRAIN else name
        return self.machine.ask("GET", f"/deployments/name/{flow}/{name}")

    def runs(self, name: str) -> list[dict[str, Any]]:
        """Of a registered flow, without those that its schedule planned."""
        of = {"deployment_id": {"any_": [self.deployment(name)["id"]]}}
        return self.machine.ask("POST", "/flow_runs/filter", {"flow_runs": of})

    def submit(self, browser: Browser, name: str) -> dict[str, Any]:
        """The run that the open form makes."""
        before = {one["id"] for one in self.runs(name)}
        made = browser.submit(lambda: [one for one in self.runs(name) if one["id"] not in before])
        return made[0]

    def state(self, run_id: str) -> dict[str, Any]:
        """Of a flow run."""
        return self.machine.ask("GET", f"/flow_runs/{run_id}")["state"]

    def wait_for_end(self, run_id: str) -> dict[str, Any]:
        """The state in which a flow run ended."""
        end = time.monotonic() + RUN_PATIENCE_S
        while (state := self.state(run_id))["type"] not in FINAL:
            assert time.monotonic() < end, f"{state['name']}; {self.last_lines(run_id)}"
            time.sleep(0.5)
        return state

    def last_lines(self, run_id: str) -> list[str]:
        """Of the log of a flow run, newest first."""
        wanted = {"flow_run_id": {"any_": [run_id]}}
        asked = {"logs": wanted, "sort": "TIMESTAMP_DESC", "limit": 20}
        return [one["message"] for one in self.machine.ask("POST", "/logs/filter", asked)]

    def rows(self, name: str, count: int) -> str:
        """A file of examples, every one with the secret in it."""
        file = self.folder / name
        lines = [
            json.dumps({"instruction": f"{SECRET} {name} {n}", "response": f"{SECRET} r{n}"})
            for n in range(count)
        ]
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    def release(self) -> dict[str, Any]:
        """What the form of `tune-and-deploy` holds at first; it lacks a name."""
        return {
            "data": {
                "files": [self.rows("train.jsonl", 400)],
                "validation_file": self.rows("validation.jsonl", 60),
            },
            "endpoint": {"name": "skin"},
            "evaluation": {"max_rows": 5, "max_tokens": 4},
            "deployment": {"max_replicas": 1},
            "canary": QUICK | {"traffic": self.traffic()},
        }

    def traffic(self) -> dict[str, Any]:
        """The pipeline's own requests."""
        prompts = self.rows("prompts.jsonl", 20)
        return {"prompts": prompts, "requests_per_second": 60, "max_tokens": 8}


@pytest.fixture(scope="module")
def world(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The flows of the machine's worker call the service that is made here."""
    folder = tmp_path_factory.mktemp("world")
    pace = Pace()
    with (
        Service(folder / "data", warm_trainer=False) as service,
        training_in_no_time(service, pace),
    ):
        service.listen()
        made = World(machine, service, folder, pace)
        own = {
            "TUNESHIP_URL": service.url,
            "TUNESHIP_API_KEY": service.headers["alice"]["Authorization"].split()[1],
            "TUNESHIP_CLIENT_ID": "alice",
        }
        quick = {"plan": QUICK | {"traffic": made.traffic()}}
        configure(made, "tune-and-deploy", own, {"release": made.release()})
        configure(made, "shift-traffic", own, quick)
        configure(made, RETRAIN, own, {"release": made.release() | {"model_name": "weekly"}})
        yield made
        for name in ("tune-and-deploy", "shift-traffic", RETRAIN):
            configure(made, name, {}, {})


def configure(world: World, name: str, own: dict[str, str], parameters: dict[str, Any]) -> None:
    """What `Deployments > Edit` does: variables of the flow's process, and what its form holds at first."""
    changes = {"job_variables": {"env": own}, "parameters": parameters}
    world.machine.ask("PATCH", f"/deployments/{world.deployment(name)['id']}", changes)


class training_in_no_time:  # noqa: N801 - read as a phrase
    """Plays every trainer that the service starts, as fast as `pace` lets it: losses that fall, and a model."""

    def __init__(self, service: Service, pace: Pace) -> None:
        self._service, self._pace = service, pace
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._play)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pace.step = STEPS
        self._thread.join()

    def _play(self) -> None:
        played = 0
        while not self._over.wait(0.1):
            for trainer in self._service.engines.trainers[played:]:
                play(trainer, self._pace)
                played += 1


def play(trainer: PlayedTrainer, pace: Pace) -> None:
    """One epoch."""
    trainer.start_of(STEPS)
    for number in range(1, STEPS + 1):
        while number > pace.step:
            time.sleep(0.05)
        loss = 2.0 - 0.15 * number
        measured = {"training_loss": loss, "validation_loss": loss, "perplexity": math.exp(loss)}
        place = {"step": number, "epoch": number / STEPS, "current_epoch": 1}
        rest = {"learning_rate": 1e-4, "accuracy": 0.5, "evaluated": True}
        trainer.say({"kind": "step", **place, **measured, **rest})
    trainer.complete()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One window for the tests of a file; open pages would go on drawing beside other tests."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found (Debian: chromium, chromium-driver)")
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()
