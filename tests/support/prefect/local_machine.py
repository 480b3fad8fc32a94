"""A home folder, empty but for Prefect's tables, in which `make up` has run, for all tests of a file that need it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.prefect.prefect_servers import PrefectHomes
from tests.support.waiting import free_port
from tuneship.client import Client
from tuneship.settings import ClientSettings

ROOT = Path(__file__).parents[3]
# Its standard input ends when the process of the tests closes it, or has ended in whatever way.
DOWN_AT_THE_END = """
import os, sys
sys.stdin.read()
os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", "deployments.local", "down"])
"""


@dataclass(frozen=True)
class Machine:
    """The home folder, and the environment with the ports that are used in it."""

    home: Path
    environment: dict[str, str]

    def run(self, command: str, exit_code: int = 0) -> str:
        """Run `python -m deployments.local COMMAND` and return its output, errors included."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "deployments.local", command],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == exit_code, done.stdout + done.stderr
        return done.stdout + done.stderr

    @property
    def records(self) -> dict[str, Any]:
        """Records of the running processes, by name."""
        folder = self.home / ".tuneship" / "run"
        return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}

    @property
    def prefect(self) -> str:
        """The address of the Prefect server's API."""
        return f"http://127.0.0.1:{self.environment['TUNESHIP_PREFECT_PORT']}/api"

    @property
    def auth_string(self) -> str:
        """The string for which the Prefect server asks."""
        return (self.home / ".tuneship" / "run" / "prefect-password").read_text().strip()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Call the Prefect server, and repeat the call while it answers 503 because its SQLite is locked."""
        url, auth = f"{self.prefect}{path}", httpx.BasicAuth(*self.auth_string.split(":", 1))
        for _ in range(30):
            answer = httpx.request(method, url, json=body, auth=auth, trust_env=False, timeout=300)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def client(self) -> Client:
        """Make a client of the service that runs here."""
        credentials = self.home / ".tuneship" / "data" / "credentials.json"
        return Client(ClientSettings.from_credentials(credentials))


@pytest.fixture(scope="module")
def machine(
    tmp_path_factory: pytest.TempPathFactory, prefect_homes: PrefectHomes
) -> Iterator[Machine]:
    """Run `up` in such a home, and `down` after the tests of a file, also when they are interrupted or killed.

    Not for the whole session: what `up` starts uses a twentieth of a core while idle.
    """
    home = tmp_path_factory.mktemp("home")
    prefect_homes(home / ".tuneship" / "prefect")
    ports = {name: str(free_port()) for name in ("PORT", "PREFECT_PORT", "BRIDGE_PORT")}
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    own = {f"TUNESHIP_{name}": port for name, port in ports.items()}
    own["TUNESHIP_PRELOAD_TRAINING"] = "false"  # nobody trains here
    made = Machine(home, {**kept, **own, "HOME": str(home)})
    log = home / "down.log"
    with log.open("w") as output:
        down = subprocess.Popen(
            [sys.executable, "-c", DOWN_AT_THE_END],
            cwd=ROOT,
            env=made.environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C must not reach it
        )
    try:
        made.run("up")
        yield made
    finally:
        down.communicate(timeout=900)
        assert down.returncode == 0, log.read_text()
        assert not made.records
