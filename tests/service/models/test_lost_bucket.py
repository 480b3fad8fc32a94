"""The bucket goes away in the middle of uploads and returns: generation goes on, and nothing is stored in half."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.support.fakes.swallowing_proxy import SwallowingProxy
from tests.support.faults.invariants import rows_of
from tests.support.faults.repeating import repeating
from tests.support.models.conversion import ADAPTER
from tests.support.objects.files import tar_of
from tests.support.objects.object_invariants import check_objects
from tests.support.objects.object_server import ObjectServer
from tests.support.repeats import variants
from tests.support.service.in_process import LINES, Service, jsonl
from tuneship.store.database import tables
from tuneship.store.files.object_blobs import PART_BYTES

pytestmark = pytest.mark.slow

LARGE = tar_of({**ADAPTER, "adapter_model.safetensors": b"w" * (2 * PART_BYTES + 1)})
UPLOADS: dict[str, dict[str, Any]] = {
    "/v1/datasets": {
        "data": {"name": "d", "format": "instruction"},
        "files": {"file": ("x.jsonl", jsonl(*LINES), "application/jsonl")},
    },
    "/v1/models": {
        "data": {"name": "large"},
        "files": {"file": ("x.tar", LARGE, "application/x-tar")},
    },
}


class Clients:
    """Clients who upload small and large files all the time, and one who asks a deployment."""

    def __init__(self, service: Service, deployment: str) -> None:
        self._service = service
        self._ask = f"/v1/deployments/{deployment}/generate"
        self.generated = Counter[int]()
        self.stored: list[str] = []
        # Answers by path and status.
        self.uploads = Counter[tuple[str, int]]()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let them work meanwhile."""
        with repeating(self._generate, *map(self._uploads_of, UPLOADS), pause_s=0.05):
            yield

    def _generate(self) -> None:
        body = {"prompt": "What is case 1?", "max_tokens": 8}
        self.generated[self._service.call("POST", self._ask, json=body).status_code] += 1

    def _uploads_of(self, path: str) -> Callable[[], None]:
        def upload() -> None:
            answer = self._service.call("POST", path, **UPLOADS[path])
            self._check(answer)
            self.uploads[path, answer.status_code] += 1

        return upload

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code == 201:
            self.stored.append(answer.json()["id"])
        else:
            assert int(answer.headers["retry-after"]) > 0

    def until_answered(self, status: int) -> None:
        """Wait until uploads of each kind have got this status from now on."""
        before = self.uploads.copy()
        self._service.until(
            lambda: all(self.uploads[path, status] > before[path, status] for path in UPLOADS)
        )


@pytest.fixture
def proxy(
    object_server: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SwallowingProxy]:
    """A proxy through which a service reaches its bucket."""
    host, _, port = object_server.address.partition(":")
    proxy = SwallowingProxy(host, int(port))
    with proxy.in_thread() as (near, near_port):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{near}:{near_port}")
        yield proxy


@contextmanager
def away(object_server: ObjectServer, proxy: SwallowingProxy, how: str) -> Iterator[None]:
    """Kill the server, or cut the network to it, meanwhile."""
    if how == "killed":
        object_server.stop()
    else:
        proxy.cuts.set()
    try:
        yield
    finally:
        if how == "killed":
            object_server.start()
        proxy.cuts.clear()


@pytest.mark.parametrize("away_s", [0, pytest.param(60, marks=pytest.mark.soak)])
@pytest.mark.parametrize("how", variants(["killed", "cut off"]))
def test_a_bucket_that_is_lost_in_the_middle_of_uploads_leaves_nothing_in_half(
    start: Callable[..., Service],
    object_server: ObjectServer,
    bucket: str,
    proxy: SwallowingProxy,
    how: str,
    away_s: float,
) -> None:
    service = start(blob_url=bucket)
    tuned = service.model()
    clients = Clients(service, service.deployment("d", model_name=tuned))
    with clients.at_work():
        clients.until_answered(201)
        # In the middle of a large one, which goes in parts.
        begun = proxy.passed
        service.until(lambda: proxy.passed > begun + PART_BYTES)
        with away(object_server, proxy, how):
            lost, asked = time.monotonic(), clients.generated[200]
            clients.until_answered(503)
            service.until(lambda: time.monotonic() > lost + away_s)
            service.until(lambda: clients.generated[200] > asked + 10)
        clients.until_answered(201)
    assert {*clients.generated} == {200}
    assert {status for _, status in clients.uploads} == {201, 503}
    with service.database.read() as connection:
        rows = [*rows_of(connection, tables.datasets), *rows_of(connection, tables.models)]
    others = {row["id"] for row in rows} - {*clients.stored}
    # The dataset and the model that the service was made with.
    assert ({*clients.stored} <= {row["id"] for row in rows}, len(others)) == (True, 2)
    check_objects(service)
