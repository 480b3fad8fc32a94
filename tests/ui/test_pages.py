"""What a person sees and does in the Prefect UI: forms, the run page, the report, the approval.

Everything is real but the models: `make up` in an empty home, its worker, Chromium.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.ui.browser import Browser
from tests.ui.conftest import RETRAIN, SECRETS, STEPS, World

pytestmark = pytest.mark.slow
FORMS = {
    "tune-and-deploy": ("release", "ReleaseParameters"),
    "shift-traffic": ("plan", "CanaryPlan"),
    RETRAIN: ("release", "ReleaseParameters"),
}
SETS = "Hyperparameter Sets (Optional)"
HALTS = (3, 6)
"""Steps at which the training of the release waits for its page."""
CHAIN = [
    "validate",
    "upload",
    "create-job",
    "wait-for-ft_",
    "deploy",
    "smoke-test",
    "shift-traffic",
]
"""How the names of the task runs of a release begin, in the order in which they run."""
TABS = ("Logs", "Task Runs", "Subflow Runs", "Artifacts", "Details", "Parameters")
PICTURES = ("Loss curves", "Traffic, errors and latency")


def form_of(world: World, name: str) -> str:
    return f"{world.ui}/deployments/deployment/{world.deployment(name)['id']}/run"


def page_of(world: World, run_id: str) -> str:
    return f"{world.ui}/runs/flow-run/{run_id}"


def task_names(world: World, run_id: str) -> list[str]:
    wanted = {"flow_runs": {"id": {"any_": [run_id]}}, "sort": "EXPECTED_START_TIME_ASC"}
    return [one["name"] for one in world.machine.ask("POST", "/task_runs/filter", wanted)]


def whole_chain(world: World, run_id: str) -> list[str] | None:
    """The names of a release's task runs, once Prefect has written all of them down; it does so later than states."""
    names = task_names(world, run_id)
    return names if all(any(name.startswith(one) for name in names) for one in CHAIN) else None


def artifacts(world: World, run_id: str) -> list[dict[str, Any]]:
    """Newest first."""
    wanted = {"flow_runs": {"id": {"any_": [run_id]}}, "sort": "CREATED_DESC"}
    return world.machine.ask("POST", "/artifacts/filter", wanted)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_names_and_explains_every_field_and_marks_what_may_be_left_out(
    name: str, world: World, browser: Browser
) -> None:
    parameter, model = FORMS[name]
    whole = world.deployment(name)["parameter_openapi_schema"]
    models = whole["definitions"]
    schema = models[model]
    browser.open_form(form_of(world, name))
    browser.picture(f"form of {name}")

    titles, text = browser.titles(), browser.text
    assert parameter in titles
    for field, about in schema["properties"].items():
        title = about.get("title") or field.replace("_", " ").title()
        assert (title if field in schema["required"] else f"{title} (Optional)") in titles
        meant = models.get(about.get("$ref", "").rpartition("/")[2], {})  # whose words it shares
        said = about.get("description") or meant.get("description")
        assert said, f"{field} is not explained"
        assert said.replace("`", "") in text
    assert schema["required"], "nothing is marked as required"
    for field, about in whole["properties"].items():
        words = about.get("description") or models[model].get("description")
        assert words, f"{field} is not explained"
        assert words.replace("`", "") in text


def test_the_form_of_a_release_begins_with_what_must_be_said_and_hides_what_has_a_default(
    world: World, browser: Browser
) -> None:
    browser.open_form(form_of(world, "tune-and-deploy"))
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
def deployments(world: World) -> tuple[str, str]:
    """Who serves now, and who would."""
    return world.service.deployment("old"), world.service.deployment("new")


@pytest.fixture(scope="module")
def submitted(world: World, browser: Browser, deployments: tuple[str, str]) -> dict[str, Any]:
    """The run of `shift-traffic` that the filled form made."""
    browser.open_form(form_of(world, "shift-traffic"))
    browser.write("Baseline Deployment Id", deployments[0])
    browser.write("Candidate Deployment Id", deployments[1])
    browser.give_a_value("Endpoint Name (Optional)", "str")
    browser.write("Endpoint Name (Optional)", "shop")
    browser.write("Bake Looks (Optional)", "3")
    browser.choose("Approval (Optional)", "required")
    browser.picture("filled form")
    return world.submit(browser, "shift-traffic")


@dataclass(frozen=True)
class LivePage:
    """What stands on the page of a training that waits after a step."""

    row: list[str]
    picture_width: int
    source: str
    percent: float


@dataclass(frozen=True)
class Release:
    """A run of `tune-and-deploy` out of its form, ended, and its training's page at each halt."""

    run: dict[str, Any]
    pages: dict[int, LivePage]


@pytest.fixture(scope="module")
def release_run(world: World, browser: Browser) -> Release:
    browser.open_form(form_of(world, "tune-and-deploy"))
    browser.write("Model Name", "skin")
    browser.give_a_value(SETS, "Add item")
    browser.write("Lora Rank (Optional)", "4", under=SETS)
    browser.picture("filled form of a release")
    world.pace.step = HALTS[0]
    try:
        run = world.submit(browser, "tune-and-deploy")
        pages = {step: live_page(world, browser, run["id"], step) for step in HALTS}
    finally:
        world.pace.step = STEPS
    state = world.wait_for_end(run["id"])
    assert state["type"] == "COMPLETED", state["message"]
    return Release(run, pages)


@pytest.fixture(scope="module")
def release(release_run: Release) -> str:
    """Its id."""
    return release_run.run["id"]


def live_page(world: World, browser: Browser, run_id: str, step: int) -> LivePage:
    """Let the training go on to this step, wait until its page says so, and look at it."""
    world.pace.step = step

    def shown() -> dict[str, Any]:
        pages = [one for one in artifacts(world, run_id) if one["key"] == "training"]
        assert pages, "the training has no page"
        assert f"| {step} |" in pages[0]["data"], f"the page is not yet at step {step}"
        return pages[0]

    page = browser.wait(shown)
    browser.open(f"{world.ui}/artifacts/artifact/{page['id']}", shows="validation loss")
    width = browser.wait(lambda: max(browser.picture_widths().values(), default=0) or None)
    browser.picture(f"training at step {step}")

    def bar() -> float | None:
        """It is looked at before the page is made, so it may be behind."""
        made = [one["data"] for one in artifacts(world, run_id) if one["type"] == "progress"]
        return made[0] if made and made[0] >= 100 * step / STEPS else None

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
    world: World, browser: Browser, submitted: dict[str, Any], deployments: tuple[str, str]
) -> None:
    title = f"promote-{deployments[1]}"

    def questions() -> list[dict[str, Any]]:
        wanted = {"flow_runs": {"name": {"any_": [title]}, "state": {"type": {"any_": ["PAUSED"]}}}}
        return world.machine.ask("POST", "/flow_runs/filter", wanted)

    browser.wait(lambda: len(questions()) == 1 or None)
    browser.open(page_of(world, questions()[0]["id"]), shows=title)
    browser.press("Resume")
    browser.wait_for_text("Your name, kept in the audit trail.")
    browser.picture("approval")
    assert f"Give {deployments[1]} all traffic" in browser.text
    proven = {row[0]: row for row in browser.rows() if row}
    assert "error: proven" in proven
    assert browser.value("Decision (Optional)") == "roll back", "a hasty click promotes nothing"

    browser.choose("Decision (Optional)", "promote")
    browser.submit(lambda: "'approver' is a required property" in browser.text)
    assert world.state(questions()[0]["id"])["type"] == "PAUSED"
    browser.write("Approver", "Ann")
    browser.write("Comment (Optional)", "as agreed")
    browser.submit(lambda: not questions())

    ended = world.wait_for_end(submitted["id"])
    assert ended["type"] == "COMPLETED", ended["message"]
    page = artifacts(world, submitted["id"])[0]["data"]
    assert "**promoted**" in page
    assert world.service.deployment_status(deployments[1]) == "running"
    assert world.service.deployment_status(deployments[0]) in ("deleting", "deleted")
    browser.open(page_of(world, submitted["id"]), shows="Completed")
    browser.tab("Subflow Runs")
    browser.wait_for_text(title)
    browser.picture("rollout that was approved")


def test_a_set_of_the_form_holds_only_what_a_person_typed(release_run: Release) -> None:
    chosen = release_run.run["parameters"]["release"]
    assert chosen["hyperparameter_sets"] == [{"lora_rank": 4}]
    assert chosen["hyperparameters"] is None, "a group that nobody opened"


def test_progress_losses_and_curve_move_while_it_trains(release_run: Release) -> None:
    early, late = (release_run.pages[step] for step in HALTS)
    assert (early.row[3:], late.row[3:]) == (["1.55"] * 3, ["1.1"] * 3)
    assert early.picture_width == late.picture_width >= 600
    assert early.source.partition("base64,")[2] != late.source.partition("base64,")[2]
    assert 0 < early.percent < late.percent < 100


def test_the_form_of_retrain_starts_a_run_that_says_why_it_skips(
    world: World, browser: Browser
) -> None:
    browser.open_form(form_of(world, RETRAIN))
    browser.choose("train_on (Optional)", "what is new")
    browser.write("minimum_new_examples (Optional)", "1000")
    run = world.submit(browser, RETRAIN)
    assert run["parameters"]["train_on"] == "what is new"
    assert run["parameters"]["minimum_new_examples"] == 1000
    state = world.wait_for_end(run["id"])
    assert (state["type"], state["name"]) == ("COMPLETED", "Skipped"), state["message"]
    browser.open(page_of(world, run["id"]), shows="Skipped")
    browser.picture("retraining that had nothing to do")


def test_the_page_of_a_release_reads_as_a_chain(
    world: World, browser: Browser, release: str
) -> None:
    names = browser.wait(lambda: whole_chain(world, release))
    places = [next(n for n, name in enumerate(names) if name.startswith(one)) for one in CHAIN]
    assert places == sorted(places)
    browser.open(page_of(world, release), shows="release-skin")
    browser.tab("Task Runs")
    for name in {names[place] for place in places} - {"shift-traffic-0"}:
        browser.wait_for_text(name)
    browser.picture("task runs of a release")
    browser.tab("Subflow Runs")
    browser.wait_for_text("shift-to-dep_")
    browser.tab("Artifacts")
    browser.wait_for_text("release-report")
    links = {one["key"]: one["data"] for one in artifacts(world, release)}
    assert {"job", "baseline", "candidate", "endpoint"} <= set(links)
    for kept in ("job", "candidate", "endpoint"):
        address = re.search(r"\((.*)\)", links[kept])
        assert address, links[kept]
        assert world.service.call("GET", urlsplit(address[1]).path).json()["id"] in links[kept]
    browser.picture("artifacts of a release")


def test_the_report_shows_counts_beside_limits_and_its_pictures(
    world: World, browser: Browser, release: str
) -> None:
    report = next(one for one in artifacts(world, release) if one["key"] == "release-report")
    page = f"{world.ui}/artifacts/artifact/{report['id']}"
    browser.open(page, shows="Gates at the last comparison")
    browser.wait(lambda: browser.picture_widths() or None)
    rows = {row[0]: row for row in browser.rows() if row}
    browser.picture("report")
    assert rows["outcome"][1].startswith("promoted")
    assert rows["T3 learned"][1:4] == ["pass", "0.8", "1.813"]
    state, candidate, baseline, harm = rows["error"][1:5]
    assert (state, "0 of" in candidate, "0 of" in baseline) == ("proven", True, True)
    assert harm.endswith("(3.912)"), "the evidence beside its limit"
    for picture in PICTURES:
        browser.wait(lambda wanted=picture: browser.picture_widths().get(wanted) or None)
    browser.show_end()
    browser.picture("end of the report")


def test_no_page_shows_a_prompt_or_an_answer(
    world: World, browser: Browser, release: str, submitted: dict[str, Any]
) -> None:
    runs = [release, submitted["id"]]
    for run_id in runs:
        browser.open(page_of(world, run_id), shows="Job Variables")
        for tab in TABS:
            browser.tab(tab)
            browser.wait(lambda: browser.source)
            assert_clean(browser.source)
    for one in [made for run_id in runs for made in artifacts(world, run_id)]:
        browser.open(f"{world.ui}/artifacts/artifact/{one['id']}", shows="Artifact")
        assert_clean(browser.source)


def test_nothing_that_the_server_keeps_holds_a_prompt_or_an_answer(
    world: World, release: str, submitted: dict[str, Any]
) -> None:
    """Pages load their lists piece by piece; here is all of it."""
    for kind in ("logs", "flow_runs", "task_runs", "artifacts"):
        kept = list(everything(world, kind))
        assert kept, f"no {kind} were kept"
        assert_clean(json.dumps(kept))


def everything(world: World, kind: str) -> Iterator[dict[str, Any]]:
    """Page by page."""
    seen = 0
    while page := world.machine.ask("POST", f"/{kind}/filter", {"limit": 200, "offset": seen}):
        yield from page
        seen += len(page)


def assert_clean(text: str) -> None:
    for secret in SECRETS:
        assert secret not in text
