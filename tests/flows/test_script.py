"""A flow as a script: whatever goes wrong on this machine is one line that names the place, and the exit code holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.screen import Screen
from flows.script import _ending_after, _write
from tests.flows.conftest import SCRIPT
from tuneship.client import ServiceUnreachable


def test_a_result_that_could_not_be_written_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = tmp_path / "file" / "result.json"
    done = subprocess.run(
        [sys.executable, SCRIPT.with_name("guard.py"), "--result", result],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONPATH": str(SCRIPT.parents[1]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert f"{result}: the result cannot be written" in said
    assert "Traceback" not in said
    assert not (tmp_path / ".tuneship").exists(), "a service was started"


STOPPED_AT_ITS_VERY_END = """
import os, signal
from pydantic import BaseModel
from flows.script import run_script

class Late:
    def __del__(self, kill=os.kill, itself=os.getpid(), number=signal.SIGINT):
        kill(itself, number)

late = Late()  # goes when Python takes its modules away
run_script(print, BaseModel, "does nothing")
"""


def test_a_signal_after_the_last_word_does_not_change_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_AT_ITS_VERY_END, "--result", tmp_path / "file" / "x.json"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, "it could not write its result"
    assert "the result cannot be written" in done.stdout + done.stderr


def test_a_result_that_cannot_be_written_at_the_end_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write({"outcome": "promoted"}, tmp_path, Screen())  # a folder
    assert "the result cannot be written" in "".join(capsys.readouterr())
    _write({"outcome": "promoted"}, tmp_path / "result.json", Screen())
    assert json.loads((tmp_path / "result.json").read_text()) == {"outcome": "promoted"}


def test_a_fault_of_the_machine_names_its_place() -> None:
    ending = _ending_after(FileNotFoundError(2, "No such file or directory", "/data"))
    assert (ending.message, ending.exit_code) == ("/data: No such file or directory", 1)


def test_what_nobody_has_thought_of_is_told_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNESHIP_REPORTS", str(tmp_path / "reports"))
    told = _ending_after(ZeroDivisionError("a prompt")).message
    assert told == f"unexpected ZeroDivisionError (details: {tmp_path}/reports/error.log)"
    (tmp_path / "file").touch()
    monkeypatch.setenv("TUNESHIP_REPORTS", str(tmp_path / "file"))
    told = _ending_after(ZeroDivisionError("a prompt")).message
    assert told.startswith("unexpected ZeroDivisionError (details: not written, ")
    assert "a prompt" not in told


def test_a_service_that_does_not_answer_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUNESHIP_URL", "http://me:secret@models.example:8700")
    told = _ending_after(ServiceUnreachable("get_job: no answer (ConnectError)")).message
    assert "models.example:8700 (TUNESHIP_URL)" in told
    assert "secret" not in told
