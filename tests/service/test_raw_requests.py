"""What is read as HTTP: raw sockets, the real server, an application that repeats what it was given, and h11 beside it.

h11 is another reader of the same bytes. What it refuses is refused here; what is taken is what h11 read of it.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import pytest
import uvicorn
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.waiting import PATIENCE_S, until
from tuneship.service import connections
from tuneship.service.connections import HEAD_LIMIT, OVERHEAD_LIMIT, Connection
from tuneship.service.serve import listener_on, server_config
from tuneship.settings import ServiceSettings

TOKEN = b"a-secret-of-the-caller"


class Held:
    """A request to /held is answered when this says so; meanwhile its application asks whether the caller has gone."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_go = False

    async def wait(self, receive: Any) -> None:
        while not self.may_go:
            self.asked += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(receive(), 0.01)


HELD = Held()
UNDER_WAY = set[tuple[str, int]]()
"""Callers whose request is being answered."""


async def turn(times: int) -> None:
    """Let the event loop turn."""
    for _ in range(times):
        await asyncio.sleep(0)


async def repeat(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with its request, one of each caller at a time."""
    if scope["type"] != "http":
        return
    assert scope["client"] not in UNDER_WAY
    UNDER_WAY.add(scope["client"])
    try:
        await answer(scope, receive, send)
    finally:
        UNDER_WAY.remove(scope["client"])


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """With the request; some paths ask for something else."""
    path, body = scope["path"], b""
    if path == "/begin":
        await send({"type": "http.response.start", "status": 200, "headers": []})
    while path != "/early":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    if path == "/held":
        await HELD.wait(receive)
    await turn(5)  # as if there were work: a next request would come in between
    found = Read(
        scope["method"],
        (scope["raw_path"] + b"?" + scope["query_string"]).rstrip(b"?").decode("latin-1"),
        [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
        body.decode("latin-1"),
    )
    text = json.dumps(vars(found)).encode()
    headers = [] if path == "/stream" else [(b"content-length", b"%d" % len(text))]
    if path.startswith("/say/"):
        headers.append((b"x-said", path.removeprefix("/say/").encode("latin-1")))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if path == "/broken":
        raise ZeroDivisionError
    await send({"type": "http.response.body", "body": text[:10], "more_body": True})
    await send({"type": "http.response.body", "body": text[10:]})


@dataclass
class Read:
    """One request, as a reader of the bytes understood it."""

    method: str
    target: str
    headers: list[list[str]]
    body: str


class Running:
    """The server, on an event loop of its own."""

    def __init__(self, data_dir: Path) -> None:
        settings = ServiceSettings(data_dir=data_dir)
        self.server = uvicorn.Server(server_config(repeat, settings))
        self.loop = asyncio.new_event_loop()
        with listener_on("127.0.0.1", 0) as listener:
            self.port: int = listener.getsockname()[1]
            work = self.server.serve([listener.dup()])
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(work,))
        self._thread.start()
        until(lambda: self.server.started)

    def connection_of(self, client: socket.socket) -> Any:
        """The server's end."""
        own, all_of_them = client.getsockname(), self.server.server_state.connections
        return until(lambda: next((one for one in all_of_them if one.client == own), None))

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.loop.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = Running(tmp_path_factory.mktemp("raw"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def port(running: Running) -> int:
    return running.port


def exchange(port: int, *blocks: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for block in blocks:
            connection.sendall(block)
        while block := connection.recv(1 << 16):
            received += block
    return received


def exchange_singly(running: Running, *blocks: bytes) -> bytes:
    """The same from the server's own event loop, which turns between two blocks: it reads them one by one."""

    async def exchange() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        await turn(20)  # until it is accepted
        for block in blocks:
            writer.write(block)
            await turn(3)
        received = await reader.read()
        writer.close()
        return received

    return asyncio.run_coroutine_threadsafe(exchange(), running.loop).result(PATIENCE_S)


def answers(received: bytes, *methods: str) -> list[tuple[int, bytes]]:
    """Status and body of every answer, as h11 reads them; `methods`: of the requests."""
    found: list[tuple[int, bytes]] = []
    client = h11.Connection(h11.CLIENT)
    client.receive_data(received)
    client.receive_data(b"")
    for method in methods or ("GET",) * 100:
        if not client.trailing_data[0]:
            break
        client.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
        client.send(h11.EndOfMessage())
        while isinstance(head := client.next_event(), h11.InformationalResponse):
            pass
        assert isinstance(head, h11.Response), head
        body = b""
        while isinstance(event := client.next_event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage), event
        found.append((head.status_code, body))
        if client.our_state is not h11.DONE or client.their_state is not h11.DONE:
            break
        client.start_next_cycle()
    return found


def is_refused(received: bytes) -> bool:
    """Whether this is nothing but the one error body."""
    ((status, body),) = answers(received)
    if status == 200:
        return False
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (400, "invalid_request_error")
    assert TOKEN not in received
    return True


def read_by_h11(raw: bytes) -> Read | None:
    """The first request of these bytes; None for what h11 refuses."""
    server = h11.Connection(h11.SERVER, HEAD_LIMIT)
    server.receive_data(raw)
    try:
        head = server.next_event()
        if head is h11.NEED_DATA:
            return None
        assert isinstance(head, h11.Request)
        body = b""
        while isinstance(event := server.next_event(), h11.Data):
            body += event.data
    except h11.RemoteProtocolError:
        return None
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.headers]
    target = head.target.decode("latin-1").rstrip("?")
    return Read(head.method.decode(), target, headers, body.decode("latin-1"))


def head(*lines: bytes, first: bytes = b"POST /a?b=c HTTP/1.1", host: bytes = b"Host: x") -> bytes:
    """A head that asks for the end of the connection."""
    given = [first, host, b"Authorization: Bearer " + TOKEN, b"Connection: close", *lines]
    return b"\r\n".join([*(line for line in given if line), b"", b""])


CHUNKED = b"Transfer-Encoding: chunked"
SECOND = b"GET /second HTTP/1.1\r\nHost: x\r\n\r\n"
TAKEN = {
    "no body": head(),
    "a length": head(b"Content-Length: 3") + b"abc",
    "a length of nothing": head(b"Content-Length: 0"),
    "spaces around a length": head(b"Content-Length:  3 \t") + b"abc",
    "chunks": head(CHUNKED) + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    "chunks in capitals": head(b"Transfer-Encoding: CHUNKED") + b"3\r\nabc\r\n0\r\n\r\n",
    "an empty line within chunks": head(CHUNKED) + b"8\r\na\r\n\r\n\r\nb\r\n0\r\n\r\n",
    "a chunk's extension": head(CHUNKED) + b'3;a=b;c="d"\r\nabc\r\n0\r\n\r\n',
    "a trailer": head(CHUNKED) + b"3\r\nabc\r\n0\r\nX-Client-ID: mallory\r\nHost: y\r\n\r\n",
    "no space before a value": head(b"X-A:b"),
    "spaces around a value": head(b"X-A: \t b c \t "),
    "an empty value": head(b"X-A:", b"X-B:   "),
    "the same name twice": head(b"X-A: 1", b"x-a: 2"),
    "every character of a token": head(b"!#$%&'*+-.^_`|~09azAZ: 1"),
    "bytes above ASCII in a value": head(b"X-A: \xc3\xa4\xff"),
    "HTTP/1.0": head(first=b"POST /a HTTP/1.0"),
    "HTTP/1.0 without a host": head(first=b"POST /a HTTP/1.0", host=b""),
    "HTTP/1.0 with a length": head(b"Content-Length: 3", first=b"PUT /a HTTP/1.0") + b"abc",
    "an encoded target": head(first=b"GET /a%2Fb%00%zz//../c?d=%20 HTTP/1.1"),
    "a fragment in the target": head(first=b"GET /a#b?c HTTP/1.1"),
    "two question marks": head(first=b"GET /a?b?c HTTP/1.1"),
    "a whole address": head(first=b"GET http://other/a?b HTTP/1.1"),
    "a star": head(first=b"OPTIONS * HTTP/1.1"),
    "an upgrade": head(b"Connection: upgrade", b"Upgrade: websocket", first=b"GET / HTTP/1.1"),
    "chunks behind an upgrade": head(b"Connection: upgrade", b"Upgrade: h2c", CHUNKED)
    + b"3\r\nabc\r\n0\r\n\r\n",
    "a length behind an upgrade": head(b"connection:Upgrade", b"uPgrade:h2c", b"Content-Length: 3")
    + b"abc",
    "what stands behind the last request": head() + SECOND,
}
REFUSED = {
    "a bare LF in a chunk's extension": head(CHUNKED) + b"3;a\nabc\r\n0\r\n\r\n",
    "a bare LF behind a chunk's size": head(CHUNKED) + b"3\nabc\r\n0\r\n\r\n",
    "two lengths": head(b"Content-Length: 3", b"Content-Length: 4") + b"abcd",
    "two lengths in one": head(b"Content-Length: 3, 4") + b"abcd",
    "a length with a sign": head(b"Content-Length: +3") + b"abc",
    "a negative length": head(b"Content-Length: -3") + b"abc",
    "a length with a space": head(b"Content-Length: 1 2") + b"abcdefghijkl",
    "a length in hexadecimals": head(b"Content-Length: 0x3") + b"abc",
    "a length of 30 digits": head(b"Content-Length: " + b"9" * 30),
    "an empty length": head(b"Content-Length:"),
    "an unknown coding": head(b"Transfer-Encoding: gzip"),
    "a coding before chunks": head(b"Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n",
    "a coding after chunks": head(b"Transfer-Encoding: chunked, gzip") + b"0\r\n\r\n",
    "chunks twice": head(b"Transfer-Encoding: chunked, chunked") + b"0\r\n\r\n",
    "chunks in two lines": head(CHUNKED, CHUNKED) + b"0\r\n\r\n",
    "identity and chunks": head(b"Transfer-Encoding: identity", CHUNKED) + b"0\r\n\r\n",
    "chunks and identity": head(CHUNKED, b"Transfer-Encoding: identity") + b"0\r\n\r\n",
    "nearly chunks": head(b"Transfer-Encoding: xchunked") + b"0\r\n\r\n",
    "chunks with a vertical tab": head(b"Transfer-Encoding: \x0bchunked") + b"0\r\n\r\n",
    "an empty coding": head(b"Transfer-Encoding:"),
    "a space before the colon": head(b"X-A : b"),
    "a space before the colon of a coding": head(b"Transfer-Encoding : chunked") + b"0\r\n\r\n",
    "a tab before the colon": head(b"X-A\t: b"),
    "a line without a colon": head(b"X-A"),
    "an empty name": head(b": b"),
    "a name with a space": head(b"X A: b"),
    "a name with a bracket": head(b"X(A): b"),
    "a name above ASCII": head(b"X-\xc3\xa4: b"),
    "NUL in a name": head(b"X-\x00A: b"),
    "NUL in a value": head(b"X-A: a\x00b"),
    "a bare CR in a value": head(b"X-A: a\rb"),
    "a bare CR before a line": head(b"X-A: a\rX-B: b"),
    "a form feed in a value": head(b"X-A: a\x0cb"),
    "a vertical tab in a value": head(b"X-A: a\x0bb"),
    "a folded first line": b"GET / HTTP/1.1\r\n X-A: b\r\nHost: x\r\n\r\n",
    "no host": head(host=b""),
    "two hosts": head(b"Host: y"),
    "the same host twice": head(b"Host: x"),
    "two hosts of HTTP/1.0": head(b"Host: y", first=b"GET / HTTP/1.0"),
    "no version": head(first=b"GET /"),
    "no target": head(first=b"GET HTTP/1.1"),
    "an unknown version": head(first=b"GET / HTTP/1.12"),
    "a version in small letters": head(first=b"GET / http/1.1"),
    "another protocol": head(first=b"GET / ICY/1.1"),
    "two spaces before the target": head(first=b"GET  / HTTP/1.1"),
    "two spaces before the version": head(first=b"GET /  HTTP/1.1"),
    "a tab before the version": head(first=b"GET /\tHTTP/1.1"),
    "a space behind the version": head(first=b"GET / HTTP/1.1 "),
    "a space in the target": head(first=b"GET /a b HTTP/1.1"),
    "a target above ASCII": head(first=b"GET /\xc3\xa4 HTTP/1.1"),
    "NUL in the target": head(first=b"GET /\x00 HTTP/1.1"),
    "DEL in the target": head(first=b"GET /\x7f HTTP/1.1"),
    "a method with a bracket": head(first=b"G(T / HTTP/1.1"),
    "an empty line first": b"\r\n" + head(),
    "an empty bare line first": b"\n" + head(),
    "a space first": b" " + head(),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no HTTP": b"HELLO\r\n\r\n",
    "a chunk without its size": head(CHUNKED) + b"\r\nabc\r\n0\r\n\r\n",
    "a chunk's size with a sign": head(CHUNKED) + b"+3\r\nabc\r\n0\r\n\r\n",
    "a chunk's size with 0x": head(CHUNKED) + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a chunk's size behind a space": head(CHUNKED) + b" 3\r\nabc\r\n0\r\n\r\n",
    "a chunk's size of 30 digits": head(CHUNKED) + b"1" * 30 + b"\r\nabc\r\n0\r\n\r\n",
    "a chunk longer than its size": head(CHUNKED) + b"2\r\nabc\r\n0\r\n\r\n",
    "a chunk with a bare LF behind": head(CHUNKED) + b"3\r\nabc\n0\r\n\r\n",
    "a chunk with a bare CR behind": head(CHUNKED) + b"3\r\nabc\r0\r\n\r\n",
    "a chunk's size with a bare CR": head(CHUNKED) + b"3\rabc\r\n0\r\n\r\n",
    "a trailer without a colon": head(CHUNKED) + b"3\r\nabc\r\n0\r\nX-A\r\n\r\n",
    "a trailer with a space": head(CHUNKED) + b"3\r\nabc\r\n0\r\nX-A : b\r\n\r\n",
    "NUL in a trailer": head(CHUNKED) + b"3\r\nabc\r\n0\r\nX-A: \x00\r\n\r\n",
}
STRICTER = {
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "the same length twice": head(b"Content-Length: 3", b"Content-Length: 3") + b"abc",
    "the same length twice in one": head(b"Content-Length: 3, 3") + b"abc",
    "a length and chunks": head(b"Content-Length: 3", CHUNKED) + b"3\r\nabc\r\n0\r\n\r\n",
    "chunks and a length": head(CHUNKED, b"Content-Length: 3") + b"3\r\nabc\r\n0\r\n\r\n",
    "a folded value": head(b"X-A: a\r\n b"),
    "a folded coding": head(b"Transfer-Encoding:\r\n chunked") + b"0\r\n\r\n",
    "bare LFs": b"GET / HTTP/1.1\nHost: x\n\n",
    "one bare LF": head(b"X-A: a\nX-B: b"),
    "a bare LF at the end": head()[:-2] + b"\n",
    "a control character in a value": head(b"X-A: a\x01b"),
    "DEL in a value": head(b"X-A: a\x7fb"),
    "HTTP/0.9": head(first=b"GET / HTTP/0.9"),
    "HTTP/1.2": head(first=b"GET / HTTP/1.2"),
    "HTTP/2.0": head(first=b"GET / HTTP/2.0"),
    "an unknown method": head(first=b"FETCH / HTTP/1.1"),
    "a method in small letters": head(first=b"get / HTTP/1.1"),
    "CONNECT": head(first=b"CONNECT other:443 HTTP/1.1"),
    "a target without a slash": head(first=b"GET a HTTP/1.1"),
}


def of(table: dict[str, bytes]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("raw", table.values(), ids=table)


def _is_read_as_by_h11(received: bytes, raw: bytes) -> bool:
    ((status, body),) = answers(received)
    assert status == 200
    found = Read(**json.loads(body))
    for header in found.headers:  # nobody hears of an upgrade; h11 changes the case of a coding
        header[:] = [{"ignored": "upgrade"}.get(header[0], header[0]), header[1]]
        if header[0] == "transfer-encoding":
            header[1] = header[1].lower()
    return found == read_by_h11(raw)


@of(TAKEN)
def test_the_application_gets_what_h11_reads(port: int, raw: bytes) -> None:
    assert _is_read_as_by_h11(exchange(port, raw), raw)


@of(TAKEN)
def test_a_request_that_comes_byte_by_byte_is_the_same(running: Running, raw: bytes) -> None:
    blocks = [raw[at : at + 1] for at in range(len(raw.removesuffix(SECOND)))]
    assert _is_read_as_by_h11(exchange_singly(running, *blocks), raw)


@of(REFUSED)
def test_what_h11_refuses_is_refused(port: int, raw: bytes) -> None:
    assert read_by_h11(raw) is None
    assert is_refused(exchange(port, raw))


@of(STRICTER)
def test_what_another_reader_may_read_otherwise_is_refused(port: int, raw: bytes) -> None:
    assert read_by_h11(raw) is not None
    assert is_refused(exchange(port, raw))


PARTS = st.sampled_from(
    [b" ", b"\t", b"\r", b"\n", b"\r\n", b"\r\n ", b":", b": ", b",", b"\0", b"\x0b", b"\x0c", b"\x1f", b"\x7f",
     b"\xff", b"a", b"/", b"?", b"#", b"%", b"5", b"0", b"GET ", b" HTTP/1.1", b"HTTP/1.0", b"\r\nHost: x", b"Host",
     b"\r\nContent-Length: 5", b"\r\nContent-Length: 0", b"Content-Length", b"\r\nTransfer-Encoding: chunked",
     b"\r\nTransfer-Encoding:", b"chunked", b"\r\nUpgrade: h2c", b"\r\nConnection: upgrade", b"\r\nX-A: b", b"close"]
)  # fmt: skip
PLACES = st.tuples(st.floats(0, 1), PARTS, st.integers(0, 2))


@given(st.lists(PLACES, max_size=4))
def test_no_damaged_head_is_read_otherwise_than_by_h11(
    port: int, damage: list[tuple[float, bytes, int]]
) -> None:
    """`damage`: at these places this comes in, and so many bytes go out. A body of five bytes, or of no chunk."""
    damaged = b"POST /a?b HTTP/1.1\r\nHost: x\r\nX-A: a b\r\nContent-Length: 5"
    for place, part, less in damage:
        at = int(place * len(damaged))
        damaged = damaged[:at] + part + damaged[at + less :]
    raw = damaged + b"\r\nConnection: close\r\n\r\n0\r\n\r\n" + b"-" * 60
    assume(raw.index(b"\r\n\r\n") > len(damaged))
    expected = read_by_h11(raw)
    assume(expected is None or len(expected.body) < 60)  # else the server would wait for more
    received = exchange(port, raw)
    assert is_refused(received) or _is_read_as_by_h11(received, raw)


def test_pipelined_requests_are_answered_in_order_up_to_the_end(running: Running) -> None:
    first = (
        b"POST /1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    )
    second = b"POST /2 HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    raw = first + second + b"GET /3 HTTP/1.1\r\nHost: x\r\n\r\n" + head()
    received = [exchange_singly(running, raw[:at], raw[at:]) for at in range(1, len(raw))]
    received.append(exchange_singly(running, *(raw[at : at + 1] for at in range(len(raw)))))
    received.append(exchange(running.port, raw + SECOND))
    for one in received:
        found = [Read(**json.loads(body)) for _, body in answers(one)]
        read = [(one.target, one.body) for one in found]
        assert read == [("/1", "abc"), ("/2", "abc"), ("/3", ""), ("/a?b=c", "")]


def test_what_is_no_http_behind_a_request_is_refused_behind_its_answer(port: int) -> None:
    (first, _), (second, body) = answers(exchange(port, SECOND + b"HELLO\r\n\r\n" + SECOND))
    assert (first, second) == (200, 400)
    assert b"readable" in body


def test_a_body_that_nobody_reads_is_no_request(port: int) -> None:
    """The body looks like one."""
    size = b"Content-Length: %d\r\n\r\n" % len(SECOND)
    early = b"POST /early HTTP/1.1\r\nHost: x\r\n" + size + SECOND
    found = [json.loads(body)["target"] for _, body in answers(exchange(port, early + head()))]
    assert found == ["/early", "/a?b=c"]


@pytest.mark.parametrize("path", [b"/a", b"/early"])
def test_a_broken_body_is_refused_and_nothing_else_is_said(
    running: Running, path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the application waits for the body or answers without it."""
    raw = head(CHUNKED, first=b"POST " + path + b" HTTP/1.1") + b"3\r\nabc\r\nno size\r\n\r\n"
    assert is_refused(exchange(running.port, raw))
    until(lambda: not running.server.server_state.connections)
    assert [one for one in caplog.records if one.levelname == "ERROR"] == []


def test_a_broken_body_cuts_an_answer_that_has_begun(port: int) -> None:
    begin = head(CHUNKED, first=b"POST /begin HTTP/1.1") + b"3\r\nabc\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(begin)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"no size\r\n\r\n")
        rest = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert not rest.endswith(b"0\r\n\r\n")  # without its end, which is what the caller sees


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"GET / HTTP/1.1\r\nX-Pad: " + b"x" * HEAD_LIMIT, id="a head"),
        pytest.param(head(CHUNKED) + b"1;" + b"x" * (OVERHEAD_LIMIT + 99), id="an extension"),
        pytest.param(head(CHUNKED) + b"0\r\nX:" + b"x" * (OVERHEAD_LIMIT + 99), id="a trailer"),
    ],
)
def test_what_goes_on_and_on_is_refused(port: int, raw: bytes) -> None:
    blocks = [raw[at : at + 1024] for at in range(0, len(raw), 1024)]
    assert is_refused(exchange(port, *blocks))


def test_a_body_in_small_chunks_may_be_long(port: int) -> None:
    count = OVERHEAD_LIMIT
    received = exchange(port, head(CHUNKED) + b"1;a=b\r\nx\r\n" * count + b"0\r\n\r\n")
    ((status, body),) = answers(received)
    assert (status, json.loads(body)["body"]) == (200, "x" * count)


def test_who_expects_to_be_asked_for_the_body_is_asked(port: int) -> None:
    asking = head(b"Expect: 100-Continue", b"Content-Length: 3")
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(asking)
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abc")
        assert b'"body": "abc"' in b"".join(iter(lambda: connection.recv(1 << 16), b""))
    old = head(b"Expect: 100-continue", b"Content-Length: 3", first=b"POST / HTTP/1.0")
    assert answers(exchange(port, old, b"abc"))[0][0] == 200
    assert exchange(port, old, b"abc").startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_caller_with_http_1_0_gets_no_chunks_and_the_end_of_the_connection(port: int) -> None:
    """Even one who would keep it."""
    old = b"POST /stream HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\nabc"
    top, _, body = exchange(port, old + SECOND).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in top.lower()
    assert b"connection: close" in top
    assert json.loads(body)["body"] == "abc"


def test_a_caller_with_http_1_1_gets_chunks(port: int) -> None:
    received = exchange(port, head(first=b"GET /stream HTTP/1.1"))
    assert b"transfer-encoding: chunked" in received
    ((_, body),) = answers(received)
    assert json.loads(body)["target"] == "/stream"


@pytest.mark.parametrize("said", [b"%0d%0aX-Other:1", b"%0a", b"%0d", b"%00", b"%7f"])
def test_no_answer_has_a_header_that_is_two(port: int, said: bytes) -> None:
    """The application would send what the caller gave it."""
    assert exchange(port, head(first=b"GET /say/" + said + b" HTTP/1.1")) == b""
    assert b"\r\nx-said: a b\r\n" in exchange(port, head(first=b"GET /say/a%20b HTTP/1.1"))


def test_head_is_answered_without_a_body(port: int) -> None:
    """At once: the connection goes on."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"HEAD /1 HTTP/1.1\r\nHost: x\r\n\r\n")
        received = connection.recv(1 << 16)
        connection.sendall(head(first=b"HEAD /2 HTTP/1.1"))
        received += b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answers(received, "HEAD", "HEAD") == [(200, b"")] * 2


def test_an_answer_that_breaks_off_behind_its_head_has_no_end(port: int) -> None:
    top, end, body = exchange(port, head(first=b"GET /broken HTTP/1.1")).partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200 ")
    assert (bool(end), body) == (True, b"")
    assert b"content-length: " in top


def test_who_sends_on_and_on_without_reading_is_not_read_on(running: Running) -> None:
    """What waits for an answer is held in the socket, not in memory: whatever the application does meanwhile."""
    size = 66_000  # as much of a body as makes the server pause by itself
    held = b"PUT /held HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S) as connection:
        connection.sendall(held + SECOND)
        transport = running.connection_of(connection).transport
        until(lambda: HELD.asked and not transport.is_reading())
        asked = HELD.asked
        until(lambda: HELD.asked > asked + 2)
        assert not transport.is_reading()
        connection.sendall(head())
        HELD.may_go = True
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    targets = [json.loads(body)["target"] for _, body in answers(received, "PUT", "GET", "POST")]
    assert targets == ["/held", "/second", "/a?b=c"]


def test_who_is_answered_early_can_send_on_and_read_the_answer(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing over unread bytes would reset the connection."""
    monkeypatch.setattr(connections, "LINGER_S", PATIENCE_S)
    early = head(b"Content-Length: %d" % (1 << 30), first=b"POST /early HTTP/1.1")
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(early)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        for _ in range(16):  # more than the sockets hold
            connection.sendall(b"x" * (1 << 20))
    assert answers(received)[0][0] == 200


def test_the_rest_of_a_body_that_is_late_ends_the_connection(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silently: its answer has gone out, and nothing else can be one."""
    early = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(early)
        received = b""
        while b'"body": ""}' not in received:
            received += connection.recv(1 << 16)
        monkeypatch.setattr(Connection, "head_s", 0.01)
        connection.sendall(b"x")
        assert connection.recv(1 << 16) == b""
