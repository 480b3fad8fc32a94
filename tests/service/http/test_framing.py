"""Requests that break HTTP itself, sent over raw sockets because a client library would not send them."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import pytest

from tests.support.objects.files import paths_below
from tests.support.service.processes import Serve
from tests.support.waiting import PATIENCE_S
from tuneship.contract.errors import InvalidRequestError
from tuneship.service.http.sockets.body_timeout import BodyTimeout


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    started = Serve(tmp_path_factory.mktemp("framing") / "data")
    yield started
    started.stop()


def exchange(serve: Serve, *headers: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request; return the status and everything received until the server closed the connection."""
    credentials = json.loads((serve.data_dir / "credentials.json").read_text())
    head = [
        "POST /v1/fine-tuning/jobs HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {credentials['api_key']}",
        f"X-Client-ID: {credentials['client_id']}",
        "Content-Type: application/json",
        *headers,
    ]
    port = int(serve.url.rpartition(":")[2])
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        while block := connection.recv(1 << 16):
            received += block
    return int(received.split()[1]), received


def test_two_lengths_are_refused_and_the_connection_ends(serve: Serve) -> None:
    status, _ = exchange(serve, "Content-Length: 4", "Content-Length: 5", body=b"abcd")
    assert status == 400


def test_a_length_and_chunks_are_refused_and_the_connection_ends(serve: Serve) -> None:
    status, received = exchange(
        serve, "Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"
    )
    assert status == 400
    assert received.count(b"HTTP/1.1") == 1


def test_huge_headers_get_the_error_body(serve: Serve) -> None:
    status, received = exchange(serve, f"X-Pad: {'x' * 70_000}", "Content-Length: 0")
    assert status == 431
    assert b'"invalid_request_error"' in received


def test_a_body_that_is_announced_too_large_is_not_read(serve: Serve) -> None:
    status, received = exchange(serve, f"Content-Length: {1 << 30}")
    assert status == 413
    assert b'"request_id"' in received


def patience_of(messages: list[dict[str, Any]], idle_s: float, **headers: str) -> BodyTimeout:
    given = iter(messages)

    async def receive() -> dict[str, Any]:
        found = next(given, None)
        if found is None:
            await asyncio.sleep(60)
        return found or {}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return BodyTimeout({"headers": raw}, receive, idle_s)


def test_a_body_that_stops_coming_is_408() -> None:
    half = {"type": "http.request", "body": b"{", "more_body": True}

    async def read() -> None:
        patience = patience_of([half], 0.05)
        assert await patience.receive() == half
        await patience.receive()

    with pytest.raises(InvalidRequestError) as refused:
        asyncio.run(read())
    assert (refused.value.status, refused.value.retryable) == (408, True)


@pytest.mark.parametrize(
    ("media", "block", "is_taken"),
    [
        pytest.param("application/json", b" " * (1 << 18), False, id="JSON after 30 s"),
        pytest.param("multipart/form-data", b" " * (1 << 20), True, id="100 KiB a second"),
        pytest.param("multipart/form-data", b" " * (1 << 18), False, id="26 KiB a second"),
    ],
)
def test_a_body_that_comes_drop_by_drop_is_408(media: str, block: bytes, is_taken: bool) -> None:
    """A block comes every ten seconds, so the connection is never idle."""
    passed = count(step=10)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": block, "more_body": True}

    async def read() -> None:
        headers = [(b"content-type", media.encode())]
        patience = BodyTimeout({"headers": headers}, receive, clock=lambda: next(passed))
        for _ in range(8):
            await patience.receive()

    if is_taken:
        asyncio.run(read())
        return
    with pytest.raises(InvalidRequestError) as refused:
        asyncio.run(read())
    assert (refused.value.status, refused.value.retryable) == (408, True)


def test_bytes_that_came_fast_do_not_pay_for_a_crawl_afterwards() -> None:
    """A hundred mebibytes come at once, and then one byte every seven seconds."""
    passed, blocks = count(step=7), chain([b" " * (100 << 20)], repeat(b" "))

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": next(blocks), "more_body": True}

    async def read() -> None:
        headers = [(b"content-type", b"multipart/form-data")]
        patience = BodyTimeout({"headers": headers}, receive, clock=lambda: next(passed))
        for _ in range(12):
            await patience.receive()

    with pytest.raises(InvalidRequestError) as refused:
        asyncio.run(read())
    assert refused.value.status == 408


def test_the_time_that_the_service_takes_is_not_the_callers() -> None:
    """An upload is not too slow only because the disk takes a minute for each block."""
    now = 0.0

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" " * 1024, "more_body": True}

    async def read() -> None:
        nonlocal now
        headers = [(b"content-type", b"multipart/form-data")]
        patience = BodyTimeout({"headers": headers}, receive, clock=lambda: now)
        for _ in range(12):
            await patience.receive()
            now += 60

    asyncio.run(read())


@pytest.mark.slow
def test_a_body_that_stops_coming_ends_its_connection(serve: Serve) -> None:
    """The real service waits fifteen seconds for the body."""
    status, received = exchange(serve, "Content-Length: 100", body=b"{")
    assert status == 408
    assert _one_error(received, 408)["code"] == "invalid_request_error"


def test_after_the_body_a_request_may_take_its_time() -> None:
    whole = {"type": "http.request", "body": b"{}", "more_body": False}

    async def read() -> bool:
        patience = patience_of([whole], 0.01)
        await patience.receive()
        waiting = asyncio.create_task(patience.receive())
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        waiting.cancel()
        return bool(done)

    assert asyncio.run(read()) is False


def test_the_folder_of_a_service_is_its_owners_alone(serve: Serve) -> None:
    modes: set[str] = set()
    for path in paths_below(Path(serve.data_dir)):
        with suppress(FileNotFoundError):  # a temporary file
            modes.add(oct(path.stat().st_mode & 0o077))
    assert modes == {"0o0"}


def _raw(serve: Serve, *blocks: bytes) -> bytes:
    """Send these blocks, and return everything received until the server closes the connection."""
    port = int(serve.url.rpartition(":")[2])
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        for block in blocks:
            connection.sendall(block)
        while block := connection.recv(1 << 16):
            received += block
    return received


def _one_error(received: bytes, status: int) -> dict[str, Any]:
    head, _, body = received.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    error = json.loads(body)["error"]
    assert set(error) == {"code", "message", "type", "param", "details", "request_id"}
    assert f"X-Request-ID: {error['request_id']}".lower().encode() in head.lower()
    return error


def test_bytes_that_are_not_http_get_the_one_error_body(serve: Serve) -> None:
    error = _one_error(_raw(serve, b"HELLO\r\n\r\n"), 400)
    assert error["code"] == "invalid_request_error"


def test_half_a_head_is_ended_with_408(serve: Serve) -> None:
    _one_error(_raw(serve, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"), 408)


def test_a_connection_that_says_nothing_is_closed(serve: Serve) -> None:
    assert _raw(serve) == b""


def test_a_web_socket_is_an_unknown_route(serve: Serve) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert _raw(serve, head).split()[1] == b"401"  # an ordinary request, and without a key
