"""The console in a real browser: sign-in by a link, a page that follows a training, accessibility, policy, keyboard."""

import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from selenium.webdriver.common.keys import Keys

from tests.support.payloads import SCRIPTS
from tests.support.service.console import link_of
from tests.support.service.in_process import Service
from tests.support.service.releases import QUESTION, asked, ended, look
from tests.ui.browser import Browser
from tests.ui.conftest import opened_window
from tuneship.contract.declaring.scopes import PRESETS
from tuneship.gates.record import ApprovalAnswered, Phase
from tuneship.store.database import tables

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
        fallback = [{"id": old, "traffic_percentage": 100}, {"id": new, "traffic_percentage": 0}]
        lease = {"seconds": 600, "pausable": True, "fallback": fallback}
        canary = service.canary("notes", {old: 75, new: 25})
        plain = service.endpoint("plain", old)
        members = [{"id": old, "traffic_percentage": 75}, {"id": new, "traffic_percentage": 25}]
        changed = service.call(
            "PATCH", f"/v1/canary-endpoints/{canary}", json={"deployments": members, "lease": lease}
        )
        assert changed.status_code == 200, changed.text
        release = asked(service, SCRIPTS[0], baseline=old, candidate=new, endpoint=canary, job=job)
        receiver = {"url": "https://receiver.test/" + "path/" * 20, "events": ["*"]}
        receiver["description"] = SCRIPTS[0]
        hook = service.call("POST", "/v1/webhooks", json=receiver).json()["id"]
        for _ in range(60):
            service.call("POST", f"/v1/webhooks/{hook}/test", json={})
        with service.database.write() as connection:
            dead = {"status": "dead", "attempts": 10, "next_attempt_at": None, "failure": "status"}
            connection.execute(sa.update(tables.deliveries).values(**dead))
        yield {
            "service": service,
            "trainer": trainer,
            "release": release,
            "pages": [
                "",
                "/releases",
                f"/releases/{release.id}",
                f"/releases/{ended(service, 'ended').id}",
                f"/do/promote_release?release_id={release.id}&question={QUESTION}&then=/console",
                "/jobs",
                f"/jobs/{job}",
                f"/jobs/{job}?with={other}",
                "/jobs/new",
                "/datasets",
                "/datasets/new",
                f"/datasets/{data}",
                "/models",
                "/models/tuneship-tiny",
                "/endpoints",
                f"/endpoints/{canary}",
                f"/do/delete_deployment?deployment_id={old}",
                f"/do/pause_canary_endpoint?endpoint_id={canary}",
                "/deployments",
                f"/deployments/{new}",
                "/evaluations",
                f"/playground?a={old}&b={new}",
                "/webhooks",
                f"/webhooks/{hook}",
                "/keys",
                "/audit",
                "/settings",
            ],
            # Made of the same parts as those above.
            "more": [
                f"/jobs/{job}/again",
                f"/do/delete_dataset?dataset_id={data}",
                "/endpoints/new",
                "/endpoints/new-split",
                f"/endpoints/{plain}/traffic",
                "/deployments/new",
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
        sign_in(browser, service, "Overview")
        assert "#" not in browser.address
        yield browser


def sign_in(window: Browser, service: Service, shows: str, query: str = "") -> None:
    """Sign in by a new link, as somebody who is not signed in."""
    window.forget()
    code = link_of(service).partition("#")[2]
    window.open(f"{service.url}/console/sign-in{query}#{code}", shows)


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


# Names what is wider than the page, but for tables and code, which scroll by themselves.
TOO_WIDE = """
[...document.querySelectorAll("main *, header *")].filter(one => !one.closest(".scroll, pre, .log, .rail-of, .vh")
  && one.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(one => one.tagName + "." + one.className)
"""


def test_every_page_fits_at_400_percent(served: dict[str, Any], window: Browser, axe: str) -> None:
    found: list[str] = []
    # What is left of 1280 x 1024 pixels.
    window.resize(320, 256)
    for place in (*served["pages"], *served["more"]):
        window.open(f"{served['service'].url}/console{place}", "tuneship")
        window.wait(lambda: window.evaluate("document.fonts.status === 'loaded'") or None)
        root = "document.documentElement"
        if window.evaluate(f"{root}.scrollWidth > {root}.clientWidth"):
            found.append(f"{place}: {window.evaluate(TOO_WIDE)}")
        if place in served["more"]:
            found += [f"{place}: {one}" for one in window.check_accessibility(axe, RULES)]
    window.resize(*SIZES[0])
    assert found == []


def test_a_phone_shows_every_stage_of_a_release(served: dict[str, Any], window: Browser) -> None:
    window.resize(*SIZES[1])
    window.open(f"{served['service'].url}/console/releases/{served['release'].id}", "Approval")
    places = "[...document.querySelectorAll('#stages li')].map(one => one.getBoundingClientRect())"
    seen = window.evaluate(f"{places}.map(one => [one.left, one.right, one.height])")
    window.resize(*SIZES[0])
    assert len(seen) == len(window.evaluate(places)) == 9
    assert all(left >= 0 and right <= SIZES[1][0] and height for left, right, height in seen)


def test_a_release_is_printed_on_two_pages(served: dict[str, Any], window: Browser) -> None:
    place = f"/console/releases/{served['release'].id}"
    window.open(f"{served['service'].url}{place}", "waiting for a person")
    window.wait(lambda: window.evaluate("document.documentElement.dataset.drawn") or None)
    assert window.pages_on_paper() <= 2


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


def test_a_person_promotes_and_the_page_follows(served: dict[str, Any], window: Browser) -> None:
    service, release = served["service"], served["release"]
    window.open(f"{service.url}/console/releases/{release.id}", "waiting for a person")
    window.wait(lambda: window.evaluate("document.documentElement.dataset.drawn") or None)
    window.keys_to("Promote")
    window.wait_for_text("Promote the new model?")
    window.evaluate("document.querySelector('[name=name]').value = 'A. Reviewer'")
    window.keys_to("Promote")
    window.wait_for_text("A. Reviewer has answered: promote.")
    window.evaluate("window.marked = true")
    release.facts(ApprovalAnswered("promote", "A. Reviewer"))
    release.facts(look(42, 42, 80, phase=Phase.BAKE, reason="baking"))
    window.wait_for_text("A. Reviewer decided: promote")
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


LEFT = "fetch('/console/session').then(answer => answer.json()).then(left => left.idle)"
WARNING_IS_OPEN = "document.getElementById('log-off')?.open"


def wait_minutes(window: Browser, service: Service, minutes: float) -> None:
    """Let time pass, in the service and on the page."""
    service.clock.ahead += timedelta(minutes=minutes)
    passed = minutes * 60_000
    window.evaluate(f"(now => {{ Date.now = () => now() + {passed}; }})(Date.now)")


def test_a_warning_comes_before_the_end_and_one_key_prevents_it_each_time(
    served: dict[str, Any], window: Browser, axe: str
) -> None:
    service: Service = served["service"]
    sign_in(window, service, "Overview")
    window.open(f"{service.url}/console/jobs/{served['job']}", "Training")
    for time in range(3):
        wait_minutes(window, service, 14.2)
        window.wait(lambda: window.evaluate(WARNING_IS_OPEN) or None)
        assert window.evaluate("document.activeElement.textContent") == "Stay signed in"
        assert window.evaluate(LEFT) < 60, "the question itself, or the stream, is no use"
        if time == 0:
            assert window.check_accessibility(axe, RULES) == []
            window.picture("log-off")
        window.key((Keys.ENTER, Keys.SPACE, Keys.ESCAPE)[time])
        window.wait(lambda: not window.evaluate(WARNING_IS_OPEN) or None)
        assert window.evaluate(LEFT) > 890
    assert window.complaints() == []


def test_a_key_on_the_page_is_a_use_and_an_open_page_is_none(
    served: dict[str, Any], window: Browser
) -> None:
    service: Service = served["service"]
    sign_in(window, service, "Overview")
    wait_minutes(window, service, 5)
    assert window.evaluate(LEFT) < 601
    window.key(Keys.ARROW_DOWN)
    window.wait(lambda: window.evaluate(LEFT) > 890 or None)
    # Another key within the minute sends nothing.
    wait_minutes(window, service, 0.5)
    window.key(Keys.ARROW_DOWN)
    window.settle()
    assert window.evaluate(LEFT) < 880


def test_at_the_end_the_page_empties_itself_and_signing_in_leads_back_to_it(
    served: dict[str, Any], window: Browser
) -> None:
    service: Service = served["service"]
    sign_in(window, service, "Overview")
    place = f"/console/jobs/{served['job']}"
    window.open(f"{service.url}{place}", "Training")
    wait_minutes(window, service, 16)
    window.wait_for_text("the session has ended")
    assert window.address == f"{service.url}/console/sign-in?next={place.replace('/', '%2F')}"
    window.back()
    window.wait_for_text("Code of the link")
    assert "In training" not in window.text
    sign_in(window, service, "Training", f"?next={place}")
    assert window.address == f"{service.url}{place}"
    window.complaints()  # the page of a session that has ended asks once more and is led to the sign-in


def test_before_an_end_that_nothing_prevents_a_person_may_sign_in_again(
    served: dict[str, Any], window: Browser
) -> None:
    service: Service = served["service"]
    key = service.keys.issue("alice", PRESETS["viewer"], service.clock() + timedelta(seconds=55))
    headers = {"X-Client-ID": "alice", "Authorization": f"Bearer {key}"}
    answer = service.call("POST", "/v1/sign-in-links", None, headers=headers)
    window.forget()
    window.open(answer.json()["url"].replace(service.parts.public_url, service.url), "Overview")
    window.wait(lambda: window.evaluate(WARNING_IS_OPEN) or None)
    assert "This session cannot be extended" in window.text
    assert "Nobody has done" not in window.text
    window.picture("log-off-whatever-is-done")
    window.keys_to("Not yet")
    window.wait(lambda: not window.evaluate(WARNING_IS_OPEN) or None)
    wait_minutes(window, service, 1)
    window.wait_for_text("the session has ended")
    window.complaints()
