"""No page of the Prefect UI runs a script that is contained in a text it shows."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.release.reports import report
from flows.rollout import page, promotion_approval
from flows.shared.approval import ApprovalQuestion, ask
from tests.flows.shared.test_markdown import plan_of, record_of, release_of, result_of
from tests.support.payloads import SCRIPTS
from tests.support.prefect.local_machine import Machine
from tests.ui.browser import Browser

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.soak]
RUNS_A_SCRIPT = "data:text/html,<p>shown</p><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def ui(machine: Machine) -> Iterator[str]:
    """Direct the tests to the machine's Prefect server, and return the address of its UI."""
    with temporary_settings(
        {PREFECT_API_URL: machine.prefect, PREFECT_API_AUTH_STRING: machine.auth_string}
    ):
        yield machine.prefect.removesuffix("/api")


def newest(machine: Machine, key: str) -> str:
    wanted = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC", "limit": 1}
    return machine.ask("POST", "/artifacts/filter", wanted)[0]["id"]


def everything(**fields: Any) -> Any:
    """A release result whose texts all contain every script."""
    whole = result_of(" ".join(SCRIPTS))
    return whole.model_copy(update={"notes": list(SCRIPTS), **fields})


def assert_quiet(browser: Browser) -> None:
    browser.settle()
    assert browser.dialogs == 0
    assert 'href="javascript:' not in browser.source


def test_the_browser_tells_when_a_script_runs(browser: Browser) -> None:
    browser.watch_dialogs()
    browser.open(RUNS_A_SCRIPT, shows="shown")
    browser.wait(lambda: browser.dialogs or None)


def test_no_artifact_runs_a_script(
    ui: str, machine: Machine, browser: Browser, tmp_path: Path
) -> None:
    release = release_of("tag")
    release.deployment.tags = dict(zip(SCRIPTS, SCRIPTS, strict=True))
    result = everything(
        endpoint_id=None
    )  # its link would need the service, which does not run here
    text = report.report(result, release, [])

    @flow(name="scripts")
    def showing() -> None:
        report.show_report(result, release, text, tmp_path / "report.md")
        page.show(record_of(SCRIPTS[0]), logging.getLogger("tests.ui"), result)

    showing()
    browser.watch_dialogs()
    for key, shows in {
        "release-report": "Release of chapters",
        "release": "outcome",
        "rollout-1": "Rollout",
    }.items():
        browser.open(f"{ui}/artifacts/artifact/{newest(machine, key)}", shows=shows)
        browser.wait_for_text("alert(1)")
        assert_quiet(browser)


def test_no_question_runs_a_script(ui: str, browser: Browser) -> None:
    text = " ".join(SCRIPTS)
    question = ApprovalQuestion(
        title=f"promote-{SCRIPTS[0]}",
        text=promotion_approval.question_text(record_of(text), plan_of(text)),
        tag=SCRIPTS[1],
        timeout_seconds=600,
    )
    run_id, _ = ask(question)
    browser.watch_dialogs()
    browser.open(f"{ui}/runs/flow-run/{run_id}", shows="promote-")
    assert_quiet(browser)
    browser.press("Resume")
    browser.wait_for_text("Your name, kept in the audit trail.")
    browser.wait_for_text("alert(1)")
    assert_quiet(browser)
