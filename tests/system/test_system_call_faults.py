"""When the operating system refuses or half-completes system calls, answers are declared ones and nothing is half-made.

The next request without a fault succeeds, and so does the failed one when repeated with its key. SQLite writes with
`pwrite64`, Python with `write`; both are flushed with `fsync` or `fdatasync`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.faults import invariants
from tests.support.faults.refusing_kernel import FLUSH, MAKE, RENAME, Fault, Kernel
from tests.support.objects.opened import opened
from tests.support.service.forked_serve import ForkedServe
from tests.support.service.in_process import LINES, jsonl
from tests.support.waiting import until
from tests.system.test_load import TLS
from tuneship.host.file_digest import sha256_of
from tuneship.store.database import tables
from tuneship.store.database.database import Database, sqlite_url
from tuneship.store.database.identifiers import new_id
from tuneship.store.files.blobs import STAGED

pytestmark = pytest.mark.slow
WRITE, STORE = ("write",), ("pwrite64",)
STAGED_FILE, FOLDER, LOG = r"/\.staged-", r"/blobs/datasets(/ds_\w+)?$", r"sqlite-wal$"
# Faults by path of a create: system calls, error, file, and first and last affected call (None: no last one).
REFUSED = {
    "/v1/datasets": [
        (FLUSH, "EIO", STAGED_FILE, 1, None), (FLUSH, "EIO", FOLDER, 1, None), (FLUSH, "EIO", FOLDER, 2, None),
        (FLUSH, "ENOSPC", STAGED_FILE, 1, None), (FLUSH, "EIO", LOG, 1, None), (FLUSH, "EIO", LOG, 2, 2),
        (WRITE, "ENOSPC", "", 1, None), (WRITE, "EIO", STAGED_FILE, 1, None),
        (RENAME, "EIO", "", 1, None), (RENAME, "ENOSPC", "", 1, None), (MAKE, "ENOSPC", "", 1, None),
        (STORE, "ENOSPC", LOG, 1, None), (STORE, "EIO", LOG, 1, None), (STORE, "ENOSPC", LOG, 4, 4),
    ],
    "/v1/deployments": [
        (STORE, "ENOSPC", LOG, 1, None), (STORE, "ENOSPC", LOG, 4, 4), (STORE, "EIO", LOG, 2, 2),
        (STORE, "EIO", LOG, 6, 6), (FLUSH, "EIO", LOG, 1, None), (FLUSH, "EIO", LOG, 2, 2),
    ],
}  # fmt: skip
HALF = [
    ("/v1/datasets", WRITE, STAGED_FILE), ("/v1/datasets", STORE, LOG), ("/v1/deployments", STORE, LOG),
]  # fmt: skip
# System calls during which the service dies, and whether half of the data is written at that moment.
DEADLY = [
    (RENAME, False), (FLUSH, False), (WRITE, False), (WRITE, True), (STORE, False), (STORE, True),
]  # fmt: skip


@dataclass
class Environment:
    """A service and the ids of all resources that it has created."""

    kernel: Kernel
    serve: ForkedServe
    made: set[str] = field(default_factory=set[str])

    def make(self, path: str, key: str) -> None:
        """Create a resource under a key; repeat the request as long as the service asks for it."""
        answers: list[httpx.Response] = []

        def is_made() -> bool:
            answers.append(create(self.serve, path, key))
            last = answers[-1]
            assert last.status_code == 201 or last.headers["x-should-retry"] == "true", last.text
            return last.status_code == 201

        until(is_made)
        self.made.add(answers[-1].json()["id"])

    def check(self) -> None:
        """Restart and check that exactly the created resources exist, with whole files and no others on the disk."""
        self.serve.kill()
        self.serve.start()  # the start removes what a failure has left behind
        blobs = self.serve.data_dir / "blobs" / "datasets"
        database = Database(sqlite_url(self.serve.data_dir / "tuneship.sqlite"))
        with database.read() as connection:
            datasets = {
                row["id"]: row["sha256"] for row in invariants.rows_of(connection, tables.datasets)
            }
            contents = opened(connection, self.serve.data_dir, tables.datasets)
            others = {row["id"] for row in invariants.rows_of(connection, tables.deployments)}
            assert connection.exec_driver_sql("pragma integrity_check").scalar() == "ok"
        database.close()
        assert datasets.keys() | others == self.made
        assert {one.name: sha256_of(one / "data.jsonl") for one in blobs.glob("*")} == datasets
        assert set(contents.values()) <= {jsonl(*LINES)}
        assert not list((self.serve.data_dir / "scratch").glob(f"{STAGED}*"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    kernel = Kernel()
    folder = tmp_path_factory.mktemp("service")
    environment = Environment(kernel, ForkedServe(folder / "data", "", kernel.start))
    yield environment
    environment.serve.kill()
    environment.serve.end()


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


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        pytest.param(path, one, id=f"{path} {one[0][0]} {one[1]} {one[2]} {one[3]}")
        for path, faults in REFUSED.items()
        for one in faults
    ],
)
def test_a_refused_system_call_is_503_and_the_next_request_succeeds(
    environment: Environment, path: str, fault: tuple[Sequence[str], str, str, int, int | None]
) -> None:
    key = new_id("case")
    calls, error, file, first, last = fault
    with environment.kernel.injected(Fault(calls, error=error, path=file, first=first, last=last)):
        broken = create(environment.serve, path, f"broken {key}")
    # It is 201 if the failed call came after the commit.
    assert broken.status_code in (201, 503), broken.text
    if broken.status_code == 503:
        assert broken.headers["x-should-retry"] == "true"
        assert broken.json()["error"]["code"] == "internal_error"
    environment.make(path, f"after {key}")
    environment.make(path, f"broken {key}")
    environment.check()


@pytest.mark.parametrize(("path", "calls", "file"), HALF)
def test_a_partial_write_of_the_system_is_continued(
    environment: Environment, path: str, calls: Sequence[str], file: str
) -> None:
    key = new_id("case")
    with environment.kernel.injected(Fault(calls, is_half=True, path=file)):
        environment.make(path, f"half {key}")
    environment.check()


@pytest.mark.parametrize(("calls", "is_half"), DEADLY)
def test_a_death_inside_of_a_system_call_leaves_nothing_half_made(
    environment: Environment, calls: Sequence[str], is_half: bool
) -> None:
    key = new_id("case")
    fault = Fault(calls, is_deadly=True, is_half=is_half, path=str(environment.serve.data_dir))
    with environment.kernel.injected(fault), pytest.raises(httpx.TransportError):
        create(environment.serve, "/v1/datasets", f"killed {key}")
    environment.serve.kill()
    environment.serve.start()
    environment.make("/v1/datasets", f"killed {key}")
    environment.check()
