"""One person's day in the console: a real service, a real training, two releases by a plain script, and Chromium."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.support.prefect.prefect_servers import WITHOUT_SETTINGS, PrefectHomes
from tests.support.service.processes import ROOT, Serve, rows_file
from tests.ui.browser import PATIENCE_S, Browser
from tests.ui.conftest import opened_window
from tests.ui.test_console import WATCH

pytestmark = [pytest.mark.slow, pytest.mark.long]
PERSON = "A. Reviewer"
# So many looks that a person can follow, pause and decide while the traffic is split.
CANARY: dict[str, Any] = {
    "steps": [50, 100],
    "interval": "1s",
    "look_every_seconds": 1,
    "min_looks_per_step": 20,
    "min_requests_per_step": 5,
    "max_looks_per_step": 600,
    "max_looks": 1800,
    "bake_looks": 1,
    "error_gate": {"ratio": 3.0, "harm": 0.3, "ok": 0.45},
    "latency_gates": None,
    "quality_gates": None,
}


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    service = Serve(tmp_path_factory.mktemp("journey") / "data", preload_training="false")
    yield service
    service.stop()


@pytest.fixture
def run(
    serve: Serve, tmp_path: Path, prefect_homes: PrefectHomes
) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Start a release as a plain script, with the key of the pipeline."""
    started: list[subprocess.Popen[bytes]] = []
    rows = rows_file(tmp_path / "rows.jsonl", 64)
    own = os.environ | {
        **WITHOUT_SETTINGS,
        "PYTHONPATH": str(ROOT),
        "PREFECT_HOME": str(prefect_homes(tmp_path / "prefect")),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "TUNESHIP_URL": serve.url,
        "TUNESHIP_API_KEY": serve.settings_with("pipeline").api_key.get_secret_value(),
        "TUNESHIP_CLIENT_ID": serve.settings.client_id,
        "TUNESHIP_RECORDS": str(tmp_path / "records"),
        "TUNESHIP_REPORTS": str(tmp_path / "reports"),
    }

    def start(name: str, **chosen: Any) -> "subprocess.Popen[bytes]":
        traffic = {"prompts": str(rows), "requests_per_second": 10, "max_tokens": 4}
        release = {
            "model_name": "notes",
            "endpoint": {"name": "notes"},
            "training_gates": {"min_gain": 0.0, "min_validation_examples": 1},
            "evaluation": {"max_examples": 0},
            **chosen,
            "canary": {**chosen.get("canary", CANARY), "traffic": traffic, "approval": "required"},
        }
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(release))
        command = ["flows/tune_and_deploy.py", "--params", str(file)]
        result = ["--result", str(tmp_path / f"{name}-result.json")]
        with (tmp_path / f"{name}.log").open("w") as log:
            script = subprocess.Popen(
                [sys.executable, *command, *result], cwd=ROOT, env=own, stdout=log, stderr=log
            )
        started.append(script)
        return script

    yield start
    for script in started:
        script.kill()
        script.wait()


def printed_link(serve: Serve) -> str:
    """The link that `tuneship console` prints."""
    settings = serve.settings
    own = {
        "TUNESHIP_URL": serve.url,
        "TUNESHIP_API_KEY": settings.api_key.get_secret_value(),
        "TUNESHIP_CLIENT_ID": settings.client_id,
    }
    command = [sys.executable, "-m", "tuneship.cli.main", "console"]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def result(folder: Path, name: str) -> dict[str, Any]:
    """The result file of a release."""
    return json.loads((folder / f"{name}-result.json").read_text())


class Person:
    """Somebody at the browser, who reads and clicks."""

    def __init__(self, window: Browser) -> None:
        self.window = window

    def follow(self, text: str) -> None:
        """Click a link."""
        script = (
            "const link = [...document.querySelectorAll('main a, nav a')].find("
            f"one => one.textContent.trim() === {json.dumps(text)}); if (link) link.click(); "
            "return Boolean(link)"
        )
        self.window.wait(lambda: self.window.evaluate(f"(() => {{ {script} }})()") or None)

    def reads(self, *texts: str) -> None:
        """Wait until the page shows these texts, one after the other."""
        for text in texts:
            self.window.wait_for_text(text)

    def decide(self, button: str, question: str) -> None:
        """Press a button, and confirm what it asks under the person's name."""
        self.window.press(button)
        self.window.wait_for_text(question)
        self.window.evaluate(f"document.querySelector('[name=name]').value = {PERSON!r}")
        self.window.press(button)
        self.window.wait(lambda: "/do/" not in self.window.address or None)

    def choose(self, name: str, text: str) -> None:
        """Choose the option of a list that begins with a text."""
        script = (
            f"const list = document.querySelector('select[name={name}]'); "
            f"const option = [...list.options].find(one => one.text.startsWith({text!r})); "
            "list.value = option.value; list.dispatchEvent(new Event('change', {bubbles: true}))"
        )
        self.window.evaluate(f"(() => {{ {script} }})()")

    def stays(self) -> None:
        """From now on the page must follow by itself."""
        self.window.evaluate("window.marked = true")

    def stayed(self) -> bool:
        return self.window.evaluate("window.marked") is True


def test_a_person_follows_decides_compares_and_leaves(
    serve: Serve, run: Callable[..., "subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    with opened_window(tmp_path) as window:
        window.before_every_page(WATCH)
        person = Person(window)
        window.open(printed_link(serve), "Overview")
        window.wait_for_text("Nothing is in progress.")
        person.stays()
        training = {"epochs": 1, "batch_size": 8, "learning_rate": 0.001}
        data = {"files": [str(tmp_path / "rows.jsonl")]}
        script = run("first", hyperparameters=training, validation_frequency=2, data=data)
        promote(person)
        assert script.wait(PATIENCE_S) == 0

        model = result(tmp_path, "first")["model"]
        # So long that it is still at its first step when the person decides.
        slow = CANARY | {"min_looks_per_step": 400}
        script = run("second", model=model, model_name="notes-2", canary=slow)
        roll_back(person)
        script.wait(PATIENCE_S)
        assert result(tmp_path, "second")["outcome"] == "rolled_back"

        compare(person)
        person.follow("Models")
        person.reads("Base models first")
        person.follow("notes")
        person.reads("Model card", "Formal privacy guarantee")
        window.picture("card")
        assert window.evaluate("window.refused") == []
        assert window.complaints() == []
        window.press("Sign out")
        person.reads("Code of the link")
        window.back()
        person.reads("Code of the link")
        assert "Model card" not in window.text


def promote(person: Person) -> None:
    """Follow a release from its beginning, pause it, resume it, and promote it when asked."""
    # It begins while the person looks, without a reload.
    person.reads("Releases in progress")
    assert person.stayed()
    person.follow("notes")
    person.reads("notes on notes")
    person.stays()
    person.reads("The candidate gets 50 % of the traffic")
    assert person.stayed()
    person.window.picture("released")
    person.decide("Pause", "Pause this rollout?")
    # The page shows it at once, and the pipeline sees it at its next look.
    person.reads(f"Paused by {PERSON}", "a person has paused the rollout")
    person.window.picture("paused")
    person.decide("Resume", "Resume this rollout?")
    person.reads("The rollout continues", "a person has to decide")
    person.window.picture("asked")
    person.decide("Promote", "Promote the new model?")
    person.stays()
    person.reads(f"{PERSON} decided: promote", "Ended: promoted")
    assert person.stayed()
    person.window.picture("promoted")


def roll_back(person: Person) -> None:
    """Roll another release back while it has half of the traffic."""
    person.follow("Releases")
    person.reads("notes-2")
    person.follow("notes-2")
    person.reads("The candidate gets 50 % of the traffic")
    person.decide("Roll back", "Roll back this rollout?")
    person.stays()
    person.reads("Ended: rolled back", "rolled it back")
    assert person.stayed()
    person.window.picture("rolled-back")


def compare(person: Person) -> None:
    """Deploy the base model beside the promoted one, and ask both the same."""
    window = person.window
    person.follow("Models")
    person.reads("Base models first")
    person.follow("tuneship-tiny")
    person.reads("A base model.")
    person.follow("Deploy it")
    person.reads("New deployment")
    window.evaluate("document.querySelector('[name=deployment_name]').value = 'plain'")
    window.press("Deploy")
    person.reads("It serves tuneship-tiny with 1 replica.")
    person.follow("Try it")
    person.reads("Nothing is stored")
    window.wait(lambda: window.evaluate("!document.getElementById('send').disabled") or None)
    person.choose("b", "notes")
    window.evaluate("document.querySelector('[name=prompt]').value = 'What is case 1 green?'")
    window.evaluate("document.querySelector('[name=prompt]').focus()")
    window.keys(Keys.CONTROL, Keys.ENTER)
    ends = "[...document.querySelectorAll('[data-figure=end]')].map(one => one.textContent)"
    window.wait(lambda: not {"", "writing"} & {*window.evaluate(ends)} or None)
    window.picture("compared")
    answers = "[...document.querySelectorAll('.text')].map(one => one.textContent)"
    plain, tuned = window.evaluate(answers)
    assert tuned
    assert plain != tuned
