"""Tests of the pages that people use in the Prefect UI: forms, run pages, the report and the approval.

Everything but the models is real: `make up` in a new home folder, its worker, and Chromium.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.ui.browser import Browser
from tests.ui.conftest import RETRAIN, SECRETS, STEPS, PlayedInstallation, opened_window

pytestmark = [pytest.mark.slow, pytest.mark.long]
FORMS = {
    "tune-and-deploy": ("release", "ReleaseParameters"),
    "shift-traffic": ("plan", "CanaryPlan"),
    RETRAIN: ("release", "ReleaseParameters"),
}
SETS = "Hyperparameter Sets (Optional)"
# Steps at which the training of the release pauses while its page is checked.
PAUSES = (3, 6)
# Beginnings of the names of a release's task runs, in the order in which they run.
TASK_NAMES = [
    "validate",
    "upload",
    "create-job",
    "wait-for-ft_",
    "deploy",
    "smoke-test",
    "shift-traffic",
]
TABS = ("Logs", "Task Runs", "Subflow Runs", "Artifacts", "Details", "Parameters")
PICTURES = ("Loss curves", "Traffic, errors and latency")


def form_of(installation: PlayedInstallation, name: str) -> str:
    return f"{installation.ui}/deployments/deployment/{installation.deployment(name)['id']}/run"


def page_of(installation: PlayedInstallation, run_id: str) -> str:
    return f"{installation.ui}/runs/flow-run/{run_id}"


def task_names(installation: PlayedInstallation, run_id: str) -> list[str]:
    wanted = {"flow_runs": {"id": {"any_": [run_id]}}, "sort": "EXPECTED_START_TIME_ASC"}
    return [one["name"] for one in installation.machine.ask("POST", "/task_runs/filter", wanted)]


def all_task_names(installation: PlayedInstallation, run_id: str) -> list[str] | None:
    """Names of a release's task runs, or None while Prefect, which records them with a delay, lacks some of them."""
    names = task_names(installation, run_id)
    return names if all(any(name.startswith(one) for name in names) for one in TASK_NAMES) else None


def artifacts(installation: PlayedInstallation, run_id: str) -> list[dict[str, Any]]:
    """The artifacts of a run, newest first."""
    wanted = {"flow_runs": {"id": {"any_": [run_id]}}, "sort": "CREATED_DESC"}
    return installation.machine.ask("POST", "/artifacts/filter", wanted)


def test_the_pages_show_nothing_until_somebody_signs_in_with_the_string(
    installation: PlayedInstallation, tmp_path: Path
) -> None:
    form = form_of(installation, "guard")
    with opened_window(tmp_path) as window:
        window.open(form, shows="Login")
        assert "guard" not in window.text
        window.sign_in(installation.ui, "admin:pass")
        assert "Authentication failed" in window.text
        window.sign_in(installation.ui, installation.machine.auth_string)
        window.open(form, shows="guard")
        # The other name of this machine is another origin, with the same pages and the same question.
        named = installation.ui.replace("127.0.0.1", "localhost")
        window.sign_in(named, installation.machine.auth_string)
        window.open(form.replace(installation.ui, named), shows="guard")


@pytest.mark.parametrize("name", FORMS)
def test_a_form_names_and_explains_every_field_and_marks_what_may_be_left_out(
    name: str, installation: PlayedInstallation, browser: Browser
) -> None:
    parameter, model = FORMS[name]
    whole = installation.deployment(name)["parameter_openapi_schema"]
    models = whole["definitions"]
    schema = models[model]
    browser.open_form(form_of(installation, name))
    browser.picture(f"form of {name}")

    titles, text = browser.titles(), browser.text
    assert parameter in titles
    for field, about in schema["properties"].items():
        title = about.get("title") or field.replace("_", " ").title()
        assert (title if field in schema["required"] else f"{title} (Optional)") in titles
        meant = models.get(
            about.get("$ref", "").rpartition("/")[2], {}
        )  # a field without a description has that of its model
        said = about.get("description") or meant.get("description")
        assert said, f"{field} is not explained"
        assert said.replace("`", "") in text
    assert schema["required"], "nothing is marked as required"
    for field, about in whole["properties"].items():
        words = about.get("description") or models[model].get("description")
        assert words, f"{field} is not explained"
        assert words.replace("`", "") in text


def test_the_form_of_a_release_begins_with_what_must_be_said_and_hides_what_has_a_default(
    installation: PlayedInstallation, browser: Browser
) -> None:
    browser.open_form(form_of(installation, "tune-and-deploy"))
    titles = browser.titles()
    first = ["Model Name", "Data (Optional)", "Files (Optional)", "Endpoint", "Name (Optional)"]
    places = [titles.index(title) for title in first]
    assert places == sorted(places)
    assert places[-1] < titles.index("How to train: hyperparameters (Optional)")
    for hidden in ("Learning Rate (Optional)", "Min Gain (Optional)", "Audit Logging (Optional)"):
        assert hidden not in titles
    browser.give_a_value("How to train: hyperparameters (Optional)", "change")
    assert "Learning Rate (Optional)" in browser.titles()
    browser.picture("form of a release with an open group")


@pytest.fixture(scope="module")
def deployments(installation: PlayedInstallation) -> tuple[str, str]:
    """Ids of the deployment that serves and of the candidate that may replace it."""
    return installation.service.deployment("old"), installation.service.deployment("new")


@pytest.fixture(scope="module")
def submitted(
    installation: PlayedInstallation, browser: Browser, deployments: tuple[str, str]
) -> dict[str, Any]:
    """Fill in and submit the form of `shift-traffic`; return the run that it creates."""
    browser.open_form(form_of(installation, "shift-traffic"))
    browser.write("Baseline Deployment Id", deployments[0])
    browser.write("Candidate Deployment Id", deployments[1])
    browser.give_a_value("Endpoint Name (Optional)", "str")
    browser.write("Endpoint Name (Optional)", "shop")
    browser.write("Bake Looks (Optional)", "3")
    browser.choose("Approval (Optional)", "required")
    browser.picture("filled form")
    return installation.submit(browser, "shift-traffic")


@dataclass(frozen=True)
class LivePage:
    """Contents of the page of a training that is paused after a step."""

    row: list[str]
    picture_width: int
    source: str
    percent: float


@dataclass(frozen=True)
class Release:
    """A completed run of `tune-and-deploy`, started by its form, and its training's page at each pause."""

    run: dict[str, Any]
    pages: dict[int, LivePage]


@pytest.fixture(scope="module")
def release_run(installation: PlayedInstallation, browser: Browser) -> Release:
    browser.open_form(form_of(installation, "tune-and-deploy"))
    browser.write("Model Name", "skin")
    browser.give_a_value(SETS, "Add item")
    browser.write("Lora Rank (Optional)", "4", under=SETS)
    browser.picture("filled form of a release")
    installation.pace.step = PAUSES[0]
    try:
        run = installation.submit(browser, "tune-and-deploy")
        pages = {step: live_page(installation, browser, run["id"], step) for step in PAUSES}
    finally:
        installation.pace.step = STEPS
    state = installation.wait_for_end(run["id"])
    assert state["type"] == "COMPLETED", state["message"]
    return Release(run, pages)


@pytest.fixture(scope="module")
def release(release_run: Release) -> str:
    """The id of the run of the release."""
    return release_run.run["id"]


def live_page(
    installation: PlayedInstallation, browser: Browser, run_id: str, step: int
) -> LivePage:
    """Let the training go on to this step, wait until its page shows the step, and return the page's contents."""
    installation.pace.step = step

    def shown() -> dict[str, Any]:
        pages = [one for one in artifacts(installation, run_id) if one["key"] == "training"]
        assert pages, "the training has no page"
        assert f"| {step} |" in pages[0]["data"], f"the page is not yet at step {step}"
        return pages[0]

    page = browser.wait(shown)
    browser.open(f"{installation.ui}/artifacts/artifact/{page['id']}", shows="validation loss")
    width = browser.wait(lambda: max(browser.picture_widths().values(), default=0) or None)
    browser.picture(f"training at step {step}")

    def bar() -> float | None:
        """The progress in percent, or None if it is older than the page; the two are not updated together."""
        values = [
            one["data"] for one in artifacts(installation, run_id) if one["type"] == "progress"
        ]
        return values[0] if values and values[0] >= 100 * step / STEPS else None

    row = next(row for row in browser.rows() if len(row) > 1 and row[1] == str(step))
    return LivePage(row, width, page["data"], browser.wait(bar))


def test_the_filled_form_starts_a_run_with_these_parameters(
    submitted: dict[str, Any], deployments: tuple[str, str]
) -> None:
    plan = submitted["parameters"]["plan"]
    assert (plan["baseline_deployment_id"], plan["candidate_deployment_id"]) == deployments
    assert (plan["endpoint_name"], plan["endpoint_id"]) == ("shop", None)
    assert (plan["approval"], plan["bake_looks"]) == ("required", 3)
    assert plan["steps"] == [50, 100], "what the form held already"


def test_a_person_reads_the_evidence_says_promote_and_the_flow_goes_on(
    installation: PlayedInstallation,
    browser: Browser,
    submitted: dict[str, Any],
    deployments: tuple[str, str],
) -> None:
    title = f"promote-{deployments[1]}"

    def questions() -> list[dict[str, Any]]:
        wanted = {"flow_runs": {"name": {"any_": [title]}, "state": {"type": {"any_": ["PAUSED"]}}}}
        return installation.machine.ask("POST", "/flow_runs/filter", wanted)

    browser.wait(lambda: len(questions()) == 1 or None)
    browser.open(page_of(installation, questions()[0]["id"]), shows=title)
    browser.press("Resume")
    browser.wait_for_text("Your name, kept in the audit trail.")
    browser.picture("approval")
    assert f"Give {deployments[1]} all traffic" in browser.text
    proven = {row[0]: row for row in browser.rows() if row}
    assert "error: proven" in proven
    assert browser.value("Decision (Optional)") == "roll back", "a hasty click promotes nothing"

    browser.choose("Decision (Optional)", "promote")
    browser.submit(lambda: "'approver' is a required property" in browser.text)
    assert installation.state(questions()[0]["id"])["type"] == "PAUSED"
    browser.write("Approver", "Ann")
    browser.write("Comment (Optional)", "as agreed")
    browser.submit(lambda: not questions())

    ended = installation.wait_for_end(submitted["id"])
    assert ended["type"] == "COMPLETED", ended["message"]
    page = artifacts(installation, submitted["id"])[0]["data"]
    assert "**promoted**" in page
    assert installation.service.deployment_status(deployments[1]) == "running"
    assert installation.service.deployment_status(deployments[0]) in ("deleting", "deleted")
    browser.open(page_of(installation, submitted["id"]), shows="Completed")
    browser.tab("Subflow Runs")
    browser.wait_for_text(title)
    browser.picture("rollout that was approved")


def test_a_set_of_the_form_holds_only_what_a_person_typed(release_run: Release) -> None:
    chosen = release_run.run["parameters"]["release"]
    assert chosen["hyperparameter_sets"] == [{"lora_rank": 4}]
    assert chosen["hyperparameters"] is None, "a group that nobody opened"


def test_progress_losses_and_curve_move_while_it_trains(release_run: Release) -> None:
    early, late = (release_run.pages[step] for step in PAUSES)
    assert (early.row[3:], late.row[3:]) == (["1.55"] * 3, ["1.1"] * 3)
    assert early.picture_width == late.picture_width >= 600
    assert early.source.partition("base64,")[2] != late.source.partition("base64,")[2]
    assert 0 < early.percent < late.percent < 100


@pytest.mark.soak
def test_the_form_of_retrain_starts_a_run_that_says_why_it_skips(
    installation: PlayedInstallation, browser: Browser
) -> None:
    browser.open_form(form_of(installation, RETRAIN))
    browser.choose("train_on (Optional)", "what is new")
    browser.write("minimum_new_examples (Optional)", "1000")
    run = installation.submit(browser, RETRAIN)
    assert run["parameters"]["train_on"] == "what is new"
    assert run["parameters"]["minimum_new_examples"] == 1000
    state = installation.wait_for_end(run["id"])
    assert (state["type"], state["name"]) == ("COMPLETED", "Skipped"), state["message"]
    browser.open(page_of(installation, run["id"]), shows="Skipped")
    browser.picture("retraining that had nothing to do")


def test_the_page_of_a_release_reads_as_a_chain(
    installation: PlayedInstallation, browser: Browser, release: str
) -> None:
    names = browser.wait(lambda: all_task_names(installation, release))
    places = [next(n for n, name in enumerate(names) if name.startswith(one)) for one in TASK_NAMES]
    assert places == sorted(places)
    browser.open(page_of(installation, release), shows="release-skin")
    browser.tab("Task Runs")
    for name in {names[place] for place in places} - {"shift-traffic-0"}:
        browser.wait_for_text(name)
    browser.picture("task runs of a release")
    browser.tab("Subflow Runs")
    browser.wait_for_text("shift-to-dep_")
    browser.tab("Artifacts")
    browser.wait_for_text("release-report")
    links = {one["key"]: one["data"] for one in artifacts(installation, release)}
    assert {"job", "baseline", "candidate", "endpoint"} <= set(links)
    pages = {"job": "jobs", "candidate": "deployments", "endpoint": "endpoints"}
    for kept, page in pages.items():
        address = re.search(r"\((.*)\)", links[kept])
        assert address, links[kept]
        # To the console, which asks who is there.
        path = urlsplit(address[1]).path
        assert re.fullmatch(rf"/console/{page}/(ft|dep|cep)_[0-9a-z]+", path), path
        answer = installation.service.call("GET", path)
        assert (answer.status_code, urlsplit(answer.headers["location"]).path) == (
            303,
            "/console/sign-in",
        )
    browser.picture("artifacts of a release")


def test_the_report_shows_counts_beside_limits_and_its_pictures(
    installation: PlayedInstallation, browser: Browser, release: str
) -> None:
    report = next(one for one in artifacts(installation, release) if one["key"] == "release-report")
    page = f"{installation.ui}/artifacts/artifact/{report['id']}"
    browser.open(page, shows="Gates at the last comparison")
    browser.wait(lambda: browser.picture_widths() or None)
    rows = {row[0]: row for row in browser.rows() if row}
    browser.picture("report")
    assert rows["outcome"][1].startswith("promoted")
    assert rows["T3 learned"][1:4] == ["pass", "0.95", "1.813"]
    state, candidate, baseline, harm = rows["error"][1:5]
    assert (state, "0 of" in candidate, "0 of" in baseline) == ("proven", True, True)
    assert harm.endswith("(3.912)"), "the evidence beside its limit"
    for picture in PICTURES:
        browser.wait(lambda wanted=picture: browser.picture_widths().get(wanted) or None)
    browser.show_end()
    browser.picture("end of the report")


@pytest.mark.soak  # the next test looks at what all pages are made of
def test_no_page_shows_a_prompt_or_an_answer(
    installation: PlayedInstallation, browser: Browser, release: str, submitted: dict[str, Any]
) -> None:
    runs = [release, submitted["id"]]
    for run_id in runs:
        browser.open(page_of(installation, run_id), shows="Job Variables")
        for tab in TABS:
            browser.tab(tab)
            browser.wait(lambda: browser.source)
            assert_clean(browser.source)
    for one in [artifact for run_id in runs for artifact in artifacts(installation, run_id)]:
        browser.open(f"{installation.ui}/artifacts/artifact/{one['id']}", shows="Artifact")
        assert_clean(browser.source)


def test_nothing_that_the_server_keeps_holds_a_prompt_or_an_answer(
    installation: PlayedInstallation, release: str, submitted: dict[str, Any]
) -> None:
    """Check all stored objects through the API, because pages show only parts of long lists."""
    for kind in ("logs", "flow_runs", "task_runs", "artifacts"):
        kept = list(everything(installation, kind))
        assert kept, f"no {kind} were kept"
        assert_clean(json.dumps(kept))


def everything(installation: PlayedInstallation, kind: str) -> Iterator[dict[str, Any]]:
    """Fetch all objects of a kind from the Prefect server, page by page."""
    offset = 0
    while page := installation.machine.ask(
        "POST", f"/{kind}/filter", {"limit": 200, "offset": offset}
    ):
        yield from page
        offset += len(page)


def assert_clean(text: str) -> None:
    for secret in SECRETS:
        assert secret not in text
