"""The script of a release on a real terminal: a picture, its lines with `--plain`, and the lines after Ctrl-C."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.conftest import SCRIPT, environment_for, in_use, wait_for
from tests.flows.release.test_retrain import release, write
from tests.support.fakes.release_service import WholeReleaseService
from tests.support.terminals import ESCAPES, TerminalOf

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

Start = Callable[..., TerminalOf]


@pytest.fixture
def service(
    prefect_api: None, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WholeReleaseService]:
    with in_use(WholeReleaseService(), tmp_path / "reports", monkeypatch) as running:
        assert isinstance(running, WholeReleaseService)
        yield running


@pytest.fixture
def start(service: WholeReleaseService, tmp_path: Path) -> Iterator[Start]:
    """Starts the script on a terminal, and kills it if it still runs at the end of the test."""
    started: list[TerminalOf] = []

    def run(*options: str, **canary: Any) -> TerminalOf:
        file = write(tmp_path / "data" / "a.jsonl", 0, 80)
        wanted = release(tmp_path, files=[str(file)]).model_dump(mode="json", exclude_unset=True)
        wanted["canary"] |= canary
        params = tmp_path / "release.json"
        params.write_text(json.dumps(wanted))
        script = SCRIPT.with_name("tune_and_deploy.py")
        command = [sys.executable, script, "--params", params, *options]
        started.append(TerminalOf(command, environment_for(service)))
        return started[-1]

    yield run
    for terminal in started:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()


def test_a_release_is_one_picture_that_ends_with_its_outcome(start: Start) -> None:
    terminal = start()
    assert terminal.end() == 0, terminal.text
    screen = terminal.screen
    first = screen.index(next(line for line in screen if line.startswith("release  ")))
    assert screen[first + 1] == (
        "✓ validate ✓ upload ✓ combine ✓ tune ✓ deploy ✓ evaluate ✓ shift ✓ promote"
    )
    assert any("baseline 0 %  candidate 100 %" in line for line in screen)
    assert any("error" in line and "proven" in line for line in screen)
    end = next(place for place, line in enumerate(screen) if "serves all traffic." in line)
    assert "report: " in screen[end + 1]
    # Neither Prefect's log nor a line of the flow's has moved the picture.
    assert [line for line in screen if "INFO" in line or "split: " in line] == []
    assert "\n".join(screen).count("✓ validate") == 1
    assert "\x1b[?25h" in terminal.shown.rpartition("✓ promote")[2], "the cursor is shown again"


def test_plain_lines_move_no_cursor(start: Start) -> None:
    terminal = start("--plain")
    assert terminal.end() == 0, terminal.text
    assert {found[2] for found in ESCAPES.finditer(terminal.shown)} <= {"m"}, "more than colours"
    for said in (
        "training gates: pass",
        "split: candidate 50 %, baseline 50 %",
        "promoted; report",
    ):
        assert f"s {said}" in terminal.text


def test_ctrl_c_ends_the_picture_and_goes_on_in_lines(start: Start) -> None:
    terminal = start(look_every_seconds=0.5, steps=[5, 50, 100])
    wait_for(lambda: "baseline 95 %  candidate 5 %" in terminal.text)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130, terminal.text
    screen = [line for line in terminal.screen if line]
    said = " ".join(terminal.text.split())
    assert "s stopped: the traffic went back to the model that served before. Run the same" in said
    assert said.endswith(".jsonl"), "the record is named"
    (returned,) = [line for line in screen if "split: candidate 0 %, baseline 100 %" in line]
    assert screen.index(returned) > max(
        place for place, line in enumerate(screen) if "● shift" in line
    )
    assert "\n".join(screen).count("● shift") == 1
    assert "\x1b[?25h" in terminal.shown, "the cursor is shown again"


def test_a_release_that_waits_for_another_one_names_it(start: Start, records: Path) -> None:
    first = start(look_every_seconds=0.5, steps=[5, 50, 100])
    wait_for(lambda: "candidate 5 %" in first.text)
    second = start("--plain", look_every_seconds=0.5)
    wait_for(lambda: "s waiting: release rel_" in second.text)
    (record,) = (records / "releases").glob("*.jsonl")
    key = json.loads(record.read_text().partition("\n")[0])["run_key"]
    assert f"(run key {key}) of this endpoint is in progress" in " ".join(second.text.split())
