"""The console in a real browser: sign-in by a link, a page that follows a training, accessibility, policy, keyboard."""

import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.payloads import SCRIPTS
from tests.support.service.console import link_of
from tests.support.service.in_process import Service
from tests.ui.browser import Browser
from tests.ui.conftest import opened_window

pytestmark = [pytest.mark.slow, pytest.mark.essential]
AXE = "axe-core@4.14.1"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SIZES = ((1440, 900), (390, 844))
SCHEMES = ("light", "dark")
# Counts what the policy refuses from the first moment on.
WATCH = """
window.refused = [];
document.addEventListener("securitypolicyviolation", event => window.refused.push(event.violatedDirective));
"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script that checks accessibility; skips where it cannot be had."""
    folder = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm not found")
    got = subprocess.run([npm, "pack", "--silent", AXE], cwd=folder, check=False)
    if got.returncode:
        pytest.skip(f"{AXE} cannot be fetched")
    [archive] = folder.glob("*.tgz")
    with tarfile.open(archive) as opened:
        script = opened.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A service with one of each, and texts in it that would be scripts on a careless page."""
    with Service(tmp_path_factory.mktemp("console")) as service:
        service.listen()
        tags = {f"tag {number}": text for number, text in enumerate(SCRIPTS) if "\t" not in text}
        data = service.dataset(tags=json.dumps(tags), description=SCRIPTS[0])
        job = service.job(tags=tags, dataset_id=data)
        trainer = service.trainer_of(job)
        trainer.start_of(4)
        other = service.job(model_name="other")
        beside = service.trainer_of(other)
        beside.start_of(4)
        for step in (1, 2):
            trainer.step(step, evaluated=True)
            beside.step(step, loss=2.0, evaluated=True)
        old, new = service.deployment("baseline"), service.deployment("candidate", tags=tags)
        lease = {"seconds": 600, "fallback": [{"id": old, "traffic_percentage": 100}]}
        canary = service.canary("notes", {old: 75, new: 25})
        members = [{"id": old, "traffic_percentage": 75}, {"id": new, "traffic_percentage": 25}]
        lease["fallback"].append({"id": new, "traffic_percentage": 0})
        changed = service.call(
            "PATCH", f"/v1/canary-endpoints/{canary}", json={"deployments": members, "lease": lease}
        )
        assert changed.status_code == 200, changed.text
        yield {
            "service": service,
            "trainer": trainer,
            "pages": [
                "",
                "/jobs",
                f"/jobs/{job}",
                f"/jobs/{job}?with={other}",
                f"/jobs/{job}/again",
                "/datasets",
                f"/datasets/{data}",
                "/models",
                "/models/tuneship-tiny",
                "/endpoints",
                f"/endpoints/{canary}",
                "/deployments",
                f"/deployments/{new}",
                "/evaluations",
                f"/playground?a={old}&b={new}",
            ],
            "job": job,
        }


@pytest.fixture(scope="module")
def window(served: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that has signed in by a link."""
    service = served["service"]
    with opened_window(tmp_path_factory.mktemp("window")) as browser:
        browser.watch_dialogs()
        browser.before_every_page(WATCH)
        browser.open(
            f"{service.url}/console/sign-in#{link_of(service).partition('#')[2]}", "Overview"
        )
        assert "#" not in browser.address
        yield browser


def test_every_page_is_sound_in_both_schemes_and_sizes(
    served: dict[str, Any], window: Browser, axe: str
) -> None:
    found: list[str] = []
    for place in served["pages"]:
        for width, height in SIZES:
            window.resize(width, height)
            window.open(f"{served['service'].url}/console{place}", "tuneship")
            window.wait(lambda: window.evaluate("document.fonts.status === 'loaded'") or None)
            for scheme in SCHEMES:
                window.prefer(scheme)
                report = window.check_accessibility(axe, RULES)
                found += [f"{place} {width} {scheme}: {one}" for one in report]
                window.picture(
                    f"{place.strip('/').replace('/', '-') or 'overview'}-{width}-{scheme}"
                )
            wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            if window.evaluate(wide):
                found.append(f"{place} {width}: scrolls sideways")
        assert window.evaluate("window.refused") == [], place
        assert window.dialogs == 0, place
    window.resize(*SIZES[0])
    window.prefer("light")
    assert found == []
    assert window.complaints() == []


def test_a_page_follows_a_training_without_a_reload(
    served: dict[str, Any], window: Browser
) -> None:
    service: Service = served["service"]
    window.open(f"{service.url}/console/jobs/{served['job']}", "Training")
    window.evaluate("window.marked = true")
    window.wait(lambda: window.evaluate("document.documentElement.dataset.drawn") or None)
    window.wait_for_text("live")
    served["trainer"].complete()
    window.wait_for_text("completed")
    assert window.evaluate("window.marked") is True, "the page was loaded again"


def test_the_policy_stops_what_a_page_must_not_do(served: dict[str, Any], window: Browser) -> None:
    window.open(f"{served['service'].url}/console", "Overview")
    tried = {
        "script": "document.body.append(Object.assign(document.createElement('script'), {src: 'data:,1'}))",
        "style": "document.body.setAttribute('style', 'color: red');",
        "picture of elsewhere": "new Image().src = 'http://192.0.2.1/x.png'",
        "markup from text": "document.body.insertAdjacentHTML('beforeend', '<b>x</b>');",
    }
    for name, script in tried.items():
        before = len(window.evaluate("window.refused"))
        window.attempt(script)
        window.wait(lambda before=before: len(window.evaluate("window.refused")) > before or None)
        assert window.evaluate("window.ran") is None, name
    window.complaints()  # these refusals are meant


def test_a_person_signs_out_by_keys_alone(served: dict[str, Any], window: Browser) -> None:
    service: Service = served["service"]
    window.open(f"{service.url}/console", "Overview")
    window.keys_to("Sign out")
    window.wait_for_text("Code of the link")
    window.open(f"{service.url}/console/jobs", "Sign in")
