"""What stands below HTTP: a real server and raw sockets, because a client library would not send such things."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.processes import Serve
from tuneship.contract.errors import InvalidRequestError
from tuneship.service.body import Patience


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    made = Serve(tmp_path_factory.mktemp("framing") / "data")
    yield made
    made.stop()


def exchange(serve: Serve, *headers: str, body: bytes = b"") -> tuple[int, bytes]:
    """The status, and all that came until the server closed the connection."""
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
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
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


def patience_of(messages: list[dict[str, Any]], idle_s: float, **headers: str) -> Patience:
    given = iter(messages)

    async def receive() -> dict[str, Any]:
        found = next(given, None)
        if found is None:
            await asyncio.sleep(60)
        return found or {}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Patience({"headers": raw}, receive, idle_s)


def test_a_body_that_stops_coming_is_408() -> None:
    half = {"type": "http.request", "body": b"{", "more_body": True}

    async def read() -> None:
        patience = patience_of([half], 0.05)
        assert await patience.receive() == half
        await patience.receive()

    with pytest.raises(InvalidRequestError) as refused:
        asyncio.run(read())
    assert (refused.value.status, refused.value.retryable) == (408, True)


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
    files = [path for path in Path(serve.data_dir).rglob("*") if not path.is_symlink()]
    assert files
    assert {oct(path.stat().st_mode & 0o077) for path in files} == {"0o0"}
