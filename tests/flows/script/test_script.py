"""A flow that runs as a script names every fault of this machine in one line, and its exit code is right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.forms.release_form import ReleaseParameters
from flows.script.main import _ending_after, load_parameters
from flows.shared.errors import BadInput
from tests.flows.conftest import SCRIPT
from tuneship.client import ServiceUnreachable
from tuneship.contract.errors import error_from_answer


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
from flows.script.main import run_script

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


ITS_RESULT_BECOMES_A_FOLDER = """
import signal, sys
from pathlib import Path
from pydantic import BaseModel, Field
from flows.script.main import run_script
from flows.shared.signals import Stopped

def stop():
    Path(sys.argv[2]).mkdir()
    raise Stopped(signal.SIGTERM)

class Parameters(BaseModel):
    never: int = Field(default_factory=stop)

run_script(print, Parameters, "is stopped before it begins")
"""


def test_a_result_that_cannot_be_written_at_the_end_is_reported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ITS_RESULT_BECOMES_A_FOLDER, "--result", tmp_path / "result.json"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{tmp_path / 'result.json'}: the result cannot be written" in done.stderr
    assert done.returncode == 128 + 15, "the exit code is that of the run all the same"


def test_a_fault_of_the_machine_names_its_place() -> None:
    ending = _ending_after(FileNotFoundError(2, "No such file or directory", "/data"))
    assert (ending.message, ending.exit_code) == ("/data: No such file or directory", 1)


def test_an_unforeseen_error_is_reported_even_if_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNESHIP_REPORTS", str(tmp_path / "reports"))
    message = _ending_after(ZeroDivisionError("a prompt")).message
    assert message == f"unexpected ZeroDivisionError (details: {tmp_path}/reports/error.log)"
    (tmp_path / "file").touch()
    monkeypatch.setenv("TUNESHIP_REPORTS", str(tmp_path / "file"))
    message = _ending_after(ZeroDivisionError("a prompt")).message
    assert message.startswith("unexpected ZeroDivisionError (details: not written, ")
    assert "a prompt" not in message


def test_a_service_that_does_not_answer_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUNESHIP_URL", "http://me:secret@models.example:8700")
    message = _ending_after(ServiceUnreachable("get_job: no answer (ConnectError)")).message
    assert "models.example:8700 (TUNESHIP_URL)" in message
    assert "secret" not in message


@pytest.mark.parametrize("code", ["quota_exceeded", "a_code_of_a_later_version"])
def test_the_reason_of_a_refusal_is_the_code_of_the_service(code: str) -> None:
    ending = _ending_after(error_from_answer(429, {"error": {"code": code, "message": "full"}}))
    assert ending.result["reason"] == code
    assert ending.message == f"the service refused (429 {code}): full"


SAYS_AND_SHOWS = """
import sys
from flows.forms.release_form import ReleaseParameters
from flows.shared.errors import BadInput
from flows.script.lines import Lines
from tuneship.prefect.progress import TaskProgress

screen = Lines()
screen.say("words")
screen.show(TaskProgress("training", 1, 2))
screen.close(None)
sys.exit(7)
"""


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_a_run_goes_on_when_nobody_reads_what_it_says(is_disk_full: bool) -> None:
    """In `... 2>&1 | tee log` Ctrl-C ends `tee` too, but the traffic must still be returned."""
    if is_disk_full:
        writes = os.open("/dev/full", os.O_WRONLY)
    else:
        reads, writes = os.pipe()
        os.close(reads)
    done = subprocess.run(
        [sys.executable, "-c", SAYS_AND_SHOWS],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SCRIPT.parents[1])},
        stderr=writes,
        check=False,
    )
    os.close(writes)
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("{hyperparameters: {epochs: two}}", "hyperparameters.epochs: should be a valid integer, "),
        ("{hyperparameters: {epoch: 2}}", "epoch: is not a known key (did you mean epochs?)"),
        ("{epochs: 2}", "epochs: is not a known key here: it belongs to hyperparameters"),
        (
            "{data: {format: instruction}}",
            "data: one of files, dataset_ids and dataset_tags is needed",
        ),
        ("{}", "model_name: is needed"),
        ("{canary: {steps: [50, 10, 100]}}", "canary: steps must rise strictly"),
        ("a: {b: 1,\n    b: 2}", "a key is repeated in one mapping (line 2, column 5)"),
    ],
)
def test_a_params_file_is_refused_with_the_place_as_it_stands_in_the_file(
    change: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "release.yaml"
    file.write_text(change)
    with pytest.raises(BadInput) as refusal:
        load_parameters(file, ReleaseParameters)
    assert said in str(refusal.value)
    assert "literal" not in str(refusal.value)
    assert "constrained" not in str(refusal.value)
