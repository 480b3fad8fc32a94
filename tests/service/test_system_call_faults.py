"""The operating system refuses a service's system calls (strace plays the disk): a declared answer, nothing half-made.

The next good request succeeds, and so does the same one again with its key. SQLite writes with `pwrite64`, Python
with `write`; both are flushed with `fsync` or `fdatasync`.
"""

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.service import invariants
from tests.service.forked_serve import ForkedServe
from tests.service.in_process import LINES, jsonl
from tests.service.test_load import TLS
from tests.waiting import until
from tuneship.store import tables
from tuneship.store.blobs import STAGED, sha256_of
from tuneship.store.database import Database, sqlite_url
from tuneship.store.identifiers import new_id

pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,  # strace does not always let go of what it has killed
    pytest.mark.skipif(shutil.which("strace") is None, reason="no strace"),
]
FLUSH, RENAME = "fsync,fdatasync", "rename,renameat,renameat2"
REFUSED = [
    *(("/v1/datasets", call, error, first) for call, error, first in (
        (FLUSH, "EIO", 1), (FLUSH, "EIO", 2), (FLUSH, "EIO", 3), (FLUSH, "EIO", 4),
        (FLUSH, "ENOSPC", 1), ("write", "ENOSPC", 1), ("write", "EIO", 1),
        (RENAME, "EIO", 1), (RENAME, "ENOSPC", 1), ("pwrite64", "ENOSPC", 1), ("pwrite64", "EIO", 1),
        ("mkdir,mkdirat", "ENOSPC", 1),
    )),
    *(("/v1/deployments", call, error, first) for call, error, first in (
        ("pwrite64", "ENOSPC", 1), ("pwrite64", "ENOSPC", 4), ("pwrite64", "EIO", 2), (FLUSH, "EIO", 1),
    )),
]  # fmt: skip
"""Path of a create, system calls, error, and from which pass on it comes."""
DEADLY = [RENAME, FLUSH, "write", "pwrite64"]


@dataclass
class Place:
    """A service, and the ids of all that it has made."""

    serve: ForkedServe
    made: set[str] = field(default_factory=set[str])

    def make(self, path: str, key: str) -> None:
        """With its key, as often as the service asks for it."""
        answers: list[httpx.Response] = []

        def is_made() -> bool:
            answers.append(create(self.serve, path, key))
            last = answers[-1]
            assert last.status_code == 201 or last.headers["x-should-retry"] == "true", last.text
            return last.status_code == 201

        until(is_made)
        self.made.add(answers[-1].json()["id"])

    def check(self) -> None:
        """After a restart: exactly what was made, each with its whole file, and nothing else on the disk."""
        self.serve.kill()
        self.serve.start()  # what a failure has left behind is swept
        blobs = self.serve.data_dir / "blobs" / "datasets"
        database = Database(sqlite_url(self.serve.data_dir / "tuneship.sqlite"))
        with database.read() as connection:
            datasets = {
                row["id"]: row["sha256"] for row in invariants.rows_of(connection, tables.datasets)
            }
            others = {row["id"] for row in invariants.rows_of(connection, tables.deployments)}
            assert connection.exec_driver_sql("pragma integrity_check").scalar() == "ok"
        database.close()
        assert datasets.keys() | others == self.made
        assert {one.name: sha256_of(one / "data.jsonl") for one in blobs.glob("*")} == datasets
        assert not list((self.serve.data_dir / "scratch").glob(f"{STAGED}*"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(ForkedServe(tmp_path_factory.mktemp("service") / "data", ""))
    yield place
    place.serve.kill()
    place.serve.end()


@contextmanager
def injected(serve: ForkedServe, calls: str, what: str) -> Iterator[None]:
    """While the block lasts: `what` happens at system calls of the service, once at least."""
    log = serve.data_dir.parent / "strace.log"
    command = ["strace", "-f", "-p", str(serve.pid), "-e", f"trace={calls}"]
    command += ["-e", f"inject={calls}:{what}", "-o", str(log)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    line = tracer.stderr.readline()
    if "attached" not in line:
        tracer.wait(10)
        pytest.skip(f"this machine does not let processes be traced: {line.strip()}")
    try:
        yield
    finally:
        tracer.send_signal(signal.SIGTERM)  # it lets go
        tracer.communicate(timeout=30)
    assert "(INJECTED)" in log.read_text() or "killed by SIGKILL" in log.read_text()


def create(serve: ForkedServe, path: str, key: str) -> httpx.Response:
    credentials = json.loads((serve.data_dir / "credentials.json").read_text())
    headers = {
        "Authorization": f"Bearer {credentials['api_key']}",
        "X-Client-ID": credentials["client_id"],
        "Idempotency-Key": key,
    }
    options: dict[str, Any] = {"json": {"deployment_name": key, "model_name": "tuneship-tiny"}}
    if path == "/v1/datasets":
        options = {"data": {"name": "d", "format": "instruction"}}
        options["files"] = {"file": ("x", jsonl(*LINES))}
    with httpx.Client(base_url=serve.url, timeout=60, trust_env=False, verify=TLS) as http:
        return http.post(path, headers=headers, **options)


@pytest.mark.parametrize(("path", "calls", "error", "first"), REFUSED)
def test_a_refused_system_call_is_503_and_the_next_request_succeeds(
    place: Place, path: str, calls: str, error: str, first: int
) -> None:
    key = new_id("case")
    with injected(place.serve, calls, f"error={error}:when={first}+"):
        broken = create(place.serve, path, f"broken {key}")
    assert broken.status_code in (201, 503), broken.text  # 201: what failed came after the commit
    if broken.status_code == 503:
        assert broken.headers["x-should-retry"] == "true"
        assert broken.json()["error"]["code"] == "internal_error"
    place.make(path, f"after {key}")
    place.make(path, f"broken {key}")
    place.check()


@pytest.mark.parametrize("calls", DEADLY)
def test_a_death_inside_of_a_system_call_leaves_nothing_half_made(place: Place, calls: str) -> None:
    with injected(place.serve, calls, "signal=KILL:when=1"), pytest.raises(httpx.TransportError):
        create(place.serve, "/v1/datasets", f"killed {calls}")
    place.serve.kill()
    place.serve.start()
    place.make("/v1/datasets", f"killed {calls}")
    place.check()
