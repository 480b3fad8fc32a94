"""The Prefect server that a script starts for itself serves that script alone."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from flows.script.local_processes import prefect_server
from tests.flows.conftest import SCRIPT
from tests.support.fakes.canary_service import FakeService
from tests.support.prefect.prefect_servers import DATABASE, WITHOUT_SETTINGS, PrefectHomes
from tests.support.prefect.prefect_strangers import assert_strangers_get_nothing

pytestmark = pytest.mark.slow


def test_a_stranger_gets_nothing_from_the_server_of_a_script(
    tmp_path: Path, prefect_homes: PrefectHomes
) -> None:
    own = {**WITHOUT_SETTINGS, "PREFECT_HOME": str(prefect_homes(tmp_path / "prefect"))}
    with prefect_server(own, tmp_path / "prefect.log") as variables:
        assert_strangers_get_nothing(variables["PREFECT_API_URL"])
        for command in ([SCRIPT.with_name("guard.py")], ["-m", "deployments.set_up"]):
            refused = run_python(
                tmp_path, own, *command, PREFECT_API_URL=variables["PREFECT_API_URL"]
            )
            assert refused.returncode == 1
            assert "set PREFECT_API_AUTH_STRING" in refused.stderr
            assert "Traceback" not in refused.stderr
        server = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        commands = b"".join(Path(f"/proc/{one}/cmdline").read_bytes() for one in server)
    password = variables["PREFECT_API_AUTH_STRING"].partition(":")[2].encode()
    assert b"prefect_server.py" in commands
    assert password not in commands
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(password in one for one in written)


@pytest.mark.soak
def test_a_script_uses_its_own_server_even_if_the_environment_has_a_string_of_another(
    tmp_path: Path, prefect_homes: PrefectHomes
) -> None:
    home = prefect_homes(tmp_path / "prefect")
    own = {**WITHOUT_SETTINGS, "PREFECT_HOME": str(home)}
    theirs = {
        "PREFECT_API_AUTH_STRING": "somebody:else",
        "PREFECT_SERVER_API_AUTH_STRING": "somebody:else",
    }
    done = run_python(tmp_path, own, SCRIPT.with_name("guard.py"), **theirs)
    assert done.returncode == 0, done.stdout + done.stderr
    database = sqlite3.connect(home / DATABASE)
    (state,) = database.execute("select state_type from flow_run").fetchall()
    assert state == ("COMPLETED",)
    # Events come by a socket, which checks the string in its own way.
    (events,) = database.execute("select count(*) from events").fetchone()
    assert events
    database.close()


def run_python(
    folder: Path, own: dict[str, str], *command: Path | str, **settings: str
) -> "subprocess.CompletedProcess[str]":
    """Run a program that uses a fake service, with files in this folder."""
    with FakeService() as service:
        places = {
            "PYTHONPATH": str(SCRIPT.parents[1]),
            "TUNESHIP_URL": service.url,
            "TUNESHIP_API_KEY": "key",
            "TUNESHIP_CLIENT_ID": "tests",
            "TUNESHIP_RECORDS": str(folder / "records"),
            "TUNESHIP_REPORTS": str(folder / "reports"),
        }
        return subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            env=own | places | settings,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
