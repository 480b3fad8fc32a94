"""Fixtures of the browser tests: a machine set up by `make up`, whose flows use a service with played engines.

Worker, Prefect server and service are real; a release takes seconds because no model is computed. Every patient text
that goes in contains `SECRET`, so tests can check that no page shows it.
"""

import json
import math
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect.local_machine import Machine
from tests.support.service.engines import PlayedTrainer
from tests.support.service.in_process import ANSWER, Service
from tests.ui.browser import PROGRAMS, Browser
from tuneship.contract.declaring.scopes import PRESETS

SECRET = "Q7-planted-patient-text"
# The text in all prompts and references, and the models' answer.
SECRETS = (SECRET, ANSWER)
RETRAIN = "retrain-weekly"
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
RUN_PATIENCE_S = 600.0
STEPS = 8
# Settings of a rollout that takes seconds.
QUICK: dict[str, Any] = {
    "steps": [50, 100],
    "interval": "1s",
    "look_every_seconds": 1.0,
    "min_looks_per_step": 2,
    "max_looks_per_step": 600,  # so many that the needed requests arrive even on a slow machine
    "max_looks": 1800,
    "bake_looks": 2,
    "lease_seconds": 120,
    "latency_gates": None,  # test machines are busy
}


@dataclass
class Pace:
    """`step`: the last step to which a played training may go."""

    step: int = STEPS


@dataclass(frozen=True)
class PlayedInstallation:
    """The machine, the service that its flows use, and a folder for their files."""

    machine: Machine
    service: Service
    folder: Path
    pace: "Pace"

    @property
    def ui(self) -> str:
        """The address of the UI."""
        return self.machine.prefect.removesuffix("/api")

    def deployment(self, name: str) -> dict[str, Any]:
        """A registered flow, as the Prefect server describes it."""
        flow = "retrain" if name == RETRAIN else name
        return self.machine.ask("GET", f"/deployments/name/{flow}/{name}")

    def runs(self, name: str) -> list[dict[str, Any]]:
        """All runs of a registered flow."""
        chosen = {"deployment_id": {"any_": [self.deployment(name)["id"]]}}
        return self.machine.ask("POST", "/flow_runs/filter", {"flow_runs": chosen})

    def submit(self, browser: Browser, name: str) -> dict[str, Any]:
        """Submit the open form and return the run that it creates."""
        before = {one["id"] for one in self.runs(name)}
        created = browser.submit(
            lambda: [one for one in self.runs(name) if one["id"] not in before]
        )
        return created[0]

    def state(self, run_id: str) -> dict[str, Any]:
        """The state of a flow run."""
        return self.machine.ask("GET", f"/flow_runs/{run_id}")["state"]

    def wait_for_end(self, run_id: str) -> dict[str, Any]:
        """Wait until a flow run has ended, and return its last state."""
        end = time.monotonic() + RUN_PATIENCE_S
        while (state := self.state(run_id))["type"] not in FINAL:
            assert time.monotonic() < end, f"{state['name']}; {self.last_lines(run_id)}"
            time.sleep(0.5)
        return state

    def last_lines(self, run_id: str) -> list[str]:
        """The last 20 messages in the log of a flow run, newest first."""
        wanted = {"flow_run_id": {"any_": [run_id]}}
        asked = {"logs": wanted, "sort": "TIMESTAMP_DESC", "limit": 20}
        return [one["message"] for one in self.machine.ask("POST", "/logs/filter", asked)]

    def rows(self, name: str, count: int) -> str:
        """Write a file of examples that all contain the secret, and return its path."""
        file = self.folder / name
        lines = [
            json.dumps({"instruction": f"{SECRET} {name} {n}", "response": f"{SECRET} r{n}"})
            for n in range(count)
        ]
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    def release(self) -> dict[str, Any]:
        """Initial values of the form of `tune-and-deploy`; the model name is missing."""
        return {
            "data": {
                "files": [self.rows("train.jsonl", 400)],
                "validation_file": self.rows("validation.jsonl", 60),
            },
            "endpoint": {"name": "skin"},
            "evaluation": {"max_examples": 5, "max_tokens": 4},
            "deployment": {"max_replicas": 1},
            "canary": QUICK | {"traffic": self.traffic()},
        }

    def traffic(self) -> dict[str, Any]:
        """Settings of the requests that the pipeline itself sends during a rollout."""
        prompts = self.rows("prompts.jsonl", 20)
        return {"prompts": prompts, "requests_per_second": 60, "max_tokens": 8}


@pytest.fixture(scope="module")
def installation(
    machine: Machine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlayedInstallation]:
    """Start a service, and make the flows of the machine's worker use it."""
    folder = tmp_path_factory.mktemp("world")
    pace = Pace()
    with (
        Service(folder / "data", preload_training=False) as service,
        training_in_no_time(service, pace),
    ):
        service.listen()
        installed = PlayedInstallation(machine, service, folder, pace)
        own = {
            "TUNESHIP_URL": service.url,
            "TUNESHIP_API_KEY": service.keys.issue("alice", PRESETS["pipeline"], None),
            "TUNESHIP_CLIENT_ID": "alice",
        }
        quick = {"plan": QUICK | {"traffic": installed.traffic()}}
        configure(installed, "tune-and-deploy", own, {"release": installed.release()})
        configure(installed, "shift-traffic", own, quick)
        configure(
            installed, RETRAIN, own, {"release": installed.release() | {"model_name": "weekly"}}
        )
        yield installed
        for name in ("tune-and-deploy", "shift-traffic", RETRAIN):
            configure(installed, name, {}, {})


def configure(
    installation: PlayedInstallation, name: str, own: dict[str, str], parameters: dict[str, Any]
) -> None:
    """Set the environment of a flow's process and the initial values of its form, as `Deployments > Edit` does."""
    changes = {"job_variables": {"env": own}, "parameters": parameters}
    installation.machine.ask(
        "PATCH", f"/deployments/{installation.deployment(name)['id']}", changes
    )


class training_in_no_time:  # noqa: N801 - read as a phrase
    """Play every trainer that the service starts, as far as `pace` allows: its losses fall, and it makes a model."""

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
    """Play a training of one epoch."""
    trainer.start_of(STEPS)
    for number in range(1, STEPS + 1):
        while number > pace.step:
            time.sleep(0.05)
        loss = 2.0 - 0.15 * number
        measured = {"training_loss": loss, "validation_loss": loss, "perplexity": math.exp(loss)}
        position = {"step": number, "epoch": number / STEPS, "current_epoch": 1}
        rest = {"learning_rate": 1e-4, "accuracy": 0.5, "evaluated": True}
        trainer.say({"kind": "step", **position, **measured, **rest})
    trainer.complete()


@pytest.fixture(scope="module")
def browser(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Open one window for the tests of a file, and close it after them: open pages would keep using the processor."""
    with opened_window(tmp_path_factory.mktemp("browser")) as window:
        window.sign_in(machine.prefect.removesuffix("/api"), machine.auth_string)
        window.wait_for_text("Dashboard")
        yield window


@contextmanager
def opened_window(folder: Path, *flags: str) -> Iterator[Browser]:
    """Open a window that has not signed in; skips the test where there is no Chromium."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found (Debian: chromium, chromium-driver)")
    window = Browser(folder, *flags)
    yield window
    window.close()
