"""Every connection ends, with any input and in any state of the parser, and the log shows no error."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.service.in_process import Lines, Service
from tests.support.waiting import PATIENCE_S
from tuneship.service.http.sockets.connections import ConnectionTimeouts
from tuneship.service.http.sockets.server import ServerTiming

GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n"
TIMEOUTS = ConnectionTimeouts(
    head_s=0.5, keep_alive_s=2.0, keyless_s=4.0, unread_s=1.0, linger_s=0.2
)
LONG = b"Content-Length: 1000000"
CHUNKED = b"Transfer-Encoding: chunked"


@pytest.fixture
def service(start: Callable[..., Service]) -> Service:
    """A service that listens, with short timeouts."""
    listening = start()
    listening.listen(timing=ServerTiming(TIMEOUTS, check_every_s=0.05))
    return listening


@pytest.fixture(autouse=True)
def faults() -> Any:
    """Check at the end that the server and the event loop logged no error."""
    lines = Lines()
    lines.setLevel(logging.ERROR)
    names = ("asyncio", "uvicorn.error")
    for name in names:
        logging.getLogger(name).addHandler(lines)
    yield
    for name in names:
        logging.getLogger(name).removeHandler(lines)
    assert not lines.texts


def connected(service: Service, *, receive_buffer: int = 0) -> socket.socket:
    address = urlsplit(service.url)
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE_S)
    connection.connect((address.hostname, address.port))
    return connection


def received_to_the_end(connection: socket.socket) -> bytes:
    blocks = list[bytes]()
    with suppress(ConnectionResetError):
        while block := connection.recv(1 << 16):
            blocks.append(block)
    connection.close()
    return b"".join(blocks)


def sent_until_it_ends(connection: socket.socket, piece: bytes) -> None:
    """Keep sending slowly, like somebody who wants to hold the connection, until the server ends it."""
    end = time.monotonic() + PATIENCE_S
    with suppress(ConnectionError):
        while time.monotonic() < end:
            connection.sendall(piece)
            time.sleep(0.05)
    assert time.monotonic() < end, "the connection never ended"
    connection.close()


def none_is_open(service: Service) -> bool:
    assert service._server is not None
    return not len(service._server.connections) and not service._server.server_state.connections


@pytest.mark.parametrize("path", [b"/healthz", b"/v1/datasets", b"/v1/nowhere"])
@pytest.mark.parametrize("length", [LONG, CHUNKED])
def test_a_body_that_goes_on_after_its_answer_is_ended(
    service: Service, path: bytes, length: bytes
) -> None:
    connection = connected(service)
    connection.sendall(POST % (path, length))
    assert connection.recv(12).startswith(b"HTTP/1.1 40")
    sent_until_it_ends(connection, b"x" if length == LONG else b"1\r\nx\r\n")
    service.until(lambda: none_is_open(service))


@pytest.mark.parametrize("path", [b"/healthz", b"/openapi.json", b"/v1/datasets"])
@pytest.mark.parametrize("how", ["at once", "later"])
def test_a_body_that_is_none_is_ended_in_any_state_of_the_parser(
    service: Service, path: bytes, how: str
) -> None:
    service.call(
        "GET", "/openapi.json", "alice"
    )  # making it takes longer than the service waits at its end
    head, garbage = b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % (path, CHUNKED), b"no length\r\n"
    connection = connected(service)
    connection.sendall(head + (garbage if how == "at once" else b""))
    if how == "later":
        assert connection.recv(9) == b"HTTP/1.1 "
        connection.sendall(garbage)
    received_to_the_end(connection)
    service.until(lambda: none_is_open(service))


def test_garbage_behind_a_whole_request_is_ended(service: Service) -> None:
    connection = connected(service)
    connection.sendall(GET % b"/healthz" + b"\0\0\0\r\n\r\n")
    received = received_to_the_end(connection)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 400" in received


@pytest.mark.parametrize("piece", [b"x", b"X-A: b\r\n", b"\r\n"])
def test_a_head_that_never_ends_is_ended(service: Service, piece: bytes) -> None:
    connection = connected(service)
    if piece != b"\r\n":
        connection.sendall(b"GET /healthz HTTP/1.1\r\n")
    sent_until_it_ends(connection, piece)
    service.until(lambda: none_is_open(service))


def test_the_next_head_on_a_kept_connection_has_an_end_too(service: Service) -> None:
    connection = connected(service)
    connection.sendall(GET % b"/healthz" + b"GET /hea")
    received = received_to_the_end(connection)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in received


def test_a_caller_answered_early_may_rest_before_the_next_request(service: Service) -> None:
    """The rest of the body ends the timeout for the body, and must start only the one for an idle connection."""
    connection = connected(service)
    connection.sendall(POST % (b"/healthz", b"Content-Length: 4") + b"ab")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 405")
    connection.sendall(b"cd")
    assert received_to_the_end(connection) == b"", "an idle connection is closed without a word"


def test_one_request_after_the_other_without_a_key_has_an_end(service: Service) -> None:
    connection = connected(service)
    end = time.monotonic() + PATIENCE_S
    with suppress(ConnectionError):
        while time.monotonic() < end:
            connection.sendall(GET % b"/healthz")
            if not connection.recv(1 << 16):
                break
            time.sleep(0.1)
    assert time.monotonic() < end, "the connection never ended"
    connection.close()


def test_with_a_key_a_connection_is_kept_as_long_as_it_is_used(service: Service) -> None:
    async def ask() -> set[int]:
        ports = set[int]()
        async with httpx.AsyncClient(base_url=service.url, trust_env=False) as http:
            end = time.monotonic() + 2 * TIMEOUTS.keyless_s
            while time.monotonic() < end:
                answer = await http.get("/v1/models", headers=service.headers["alice"])
                assert answer.status_code == 200
                await asyncio.sleep(0.1)
                stream = answer.extensions["network_stream"]
                ports.add(stream.get_extra_info("client_addr")[1])
        return ports

    assert len(service.run(ask())) == 1


@pytest.mark.parametrize("requests", [1, 50])
def test_an_answer_that_nobody_reads_is_ended(service: Service, requests: int) -> None:
    connection = connected(service, receive_buffer=4096)
    connection.sendall(GET % b"/openapi.json" * requests)
    with suppress(ConnectionResetError):  # a slow test may look only after the end
        connection.recv(1, socket.MSG_PEEK)
    service.until(lambda: none_is_open(service))
    connection.close()


def test_an_answer_that_is_read_slowly_with_a_key_arrives(service: Service) -> None:
    """Reading takes longer than the server waits for callers who read nothing."""
    key = "\r\n".join(f"{name}: {value}" for name, value in service.headers["alice"].items())
    connection = connected(service, receive_buffer=4096)
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + key.encode() + b"\r\n\r\n")
    connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    received = b""
    while block := connection.recv(8192):
        received += block
        time.sleep(0.05)
    connection.close()
    assert received.endswith(b"}")
    assert len(received) > 100_000


@pytest.mark.parametrize("sent", [b"", b"GET /hea", GET % b"/openapi.json"])
def test_a_caller_who_closed_one_direction_leaves_nothing(service: Service, sent: bytes) -> None:
    connection = connected(service)
    connection.sendall(sent)
    connection.shutdown(socket.SHUT_WR)
    received_to_the_end(connection)
    service.until(lambda: none_is_open(service))


def test_requests_with_a_key_find_room_among_strangers_from_the_same_address(
    start: Callable[..., Service],
) -> None:
    """Ten times as many strangers connect as there is room for; each request comes on a connection of its own."""
    service = start()
    service.listen(together=20)
    strangers = [connected(service) for _ in range(200)]
    for one in strangers[-20:]:
        one.sendall(b"GET /v1/models HTTP/1.1\r\n")
    answers = [service.call("GET", path) for path in ("/v1/models", "/healthz") for _ in range(10)]
    assert {one.status_code for one in answers} == {200}
    assert service._server is not None
    assert len(service._server.connections) <= 20
    for one in strangers:
        one.close()
