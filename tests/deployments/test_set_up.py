"""The set-up never guesses which Prefect server to use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import free_port

pytestmark = pytest.mark.slow


def set_up(home: Path, **own: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "deployments.set_up"],
        env={"PATH": os.environ["PATH"], "HOME": str(home), **own},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.soak
def test_a_server_that_does_not_answer_is_reported_in_one_line(tmp_path: Path) -> None:
    done = set_up(tmp_path, PREFECT_API_URL=f"http://127.0.0.1:{free_port()}/api")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("the Prefect server of PREFECT_API_URL: ConnectError: ")


@pytest.mark.parametrize("own", [{}, {"PREFECT_API_URL": ""}])
def test_without_a_named_server_nothing_is_set_up(own: dict[str, str], tmp_path: Path) -> None:
    done = set_up(tmp_path, **own)
    assert done.returncode == 1
    assert "set PREFECT_API_URL" in done.stderr
    assert not list(tmp_path.rglob("*.db")), "a server of Prefect's own was started"
