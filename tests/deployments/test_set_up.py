"""The set-up never guesses which Prefect server to use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("own", [{}, {"PREFECT_API_URL": ""}])
def test_without_a_named_server_nothing_is_set_up(own: dict[str, str], tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **own}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "deployments.set_up"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert "set PREFECT_API_URL" in done.stderr
    assert not list(tmp_path.rglob("*.db")), "a server of Prefect's own was started"
