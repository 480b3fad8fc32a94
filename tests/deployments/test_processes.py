"""Recorded processes: only the very process that was started is ever ended."""

import json
import os
import sys
from pathlib import Path

import pytest

from deployments.processes import NotStarted, Processes

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def test_a_process_is_started_known_and_ended(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.start("one", SLEEP, os.environ, lambda: True)
    running = processes.running("one")
    assert running is not None
    assert Processes(tmp_path).running("one") == running
    assert processes.stop("one")
    assert not running.is_alive
    assert not processes.stop("one")


def test_what_ends_before_it_is_ready_is_an_error_that_names_the_log(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    with pytest.raises(NotStarted, match=r"one\.log"):
        processes.start("one", (sys.executable, "-c", "print('no')"), os.environ, lambda: False)
    assert processes.running("one") is None
    assert "no" in processes.log("one").read_text()


def test_a_process_id_that_somebody_else_has_now_is_left_alone(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    (tmp_path / "one.json").write_text(json.dumps({"pid": os.getpid(), "started": 1}))
    assert processes.running("one") is None
    assert not processes.stop("one")  # or this test would end here


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"pid": "x"}'])
def test_an_unreadable_record_is_no_process(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.json").write_text(text)
    assert Processes(tmp_path).running("one") is None
