"""Uploads report their progress, are sent again from the start, and are never held in memory."""

import io
import tracemalloc
from typing import Any

import httpx
import pytest

from tests.unit.client.both_clients import SETTINGS, both
from tuneship.client import Client
from tuneship.contract.datasets import DatasetUpload

CREATED = {
    "id": "ds_1", "name": "d", "format": "instruction", "num_examples": 1, "total_tokens": 2,
    "created_at": "2026-01-01T00:00:00Z", "status": "processed",
}  # fmt: skip
FORM = DatasetUpload(name="d", format="instruction")


def test_progress_is_reported_up_to_the_whole_file() -> None:
    content = b"x" * 300_000
    reported: list[tuple[int, int]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        assert content in request.read()
        return httpx.Response(201, json=CREATED)

    def upload(client: Any) -> Any:
        watched = client.with_options(progress=lambda *amounts: reported.append(amounts))
        return watched.datasets.upload(FORM, io.BytesIO(content))

    both(handle, upload)
    once = reported[: len(reported) // 2]
    assert reported == once * 2
    assert [size for _, size in once] == [len(content)] * len(once)
    assert len(once) > 3
    assert [sent for sent, _ in once] == sorted({sent for sent, _ in once})
    assert once[-1] == (len(content), len(content))


def test_a_repeated_upload_is_reported_from_the_front_again() -> None:
    reported: list[int] = []
    answers = iter(
        [httpx.Response(503, headers={"Retry-After": "0.01"}), httpx.Response(201, json=CREATED)]
    )

    def handle(request: httpx.Request) -> httpx.Response:
        request.read()
        return next(answers)

    with Client(SETTINGS, httpx.MockTransport(handle)) as client:
        watched = client.with_options(progress=lambda sent, size: reported.append(sent))
        watched.datasets.upload(FORM, io.BytesIO(b"abc"))
    assert reported == [3, 3]


class Endless(io.RawIOBase):
    """A file of zeros of any size, which is stored nowhere."""

    def __init__(self, size: int) -> None:
        self._size, self._position = size, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        assert 0 <= size <= 1 << 20, "the whole file is read at once"
        block = bytes(min(size, self._size - self._position))
        self._position += len(block)
        return block


class Drain(httpx.BaseTransport):
    """A transport that takes what is sent, block by block, and keeps none of it."""

    sent = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.SyncByteStream)
        for block in request.stream:
            self.sent += len(block)
        assert int(request.headers["content-length"]) == self.sent
        return httpx.Response(201, json=CREATED)


@pytest.mark.parametrize("is_watched", [True, False])
def test_an_upload_takes_the_memory_of_a_few_blocks(is_watched: bool) -> None:
    size, drain = 128 << 20, Drain()
    with Client(SETTINGS, drain) as client:
        chosen = client.with_options(progress=lambda *_: None) if is_watched else client
        tracemalloc.start()
        try:
            chosen.datasets.upload(FORM, Endless(size))  # type: ignore[arg-type]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert drain.sent > size
    assert peak < 4 << 20
