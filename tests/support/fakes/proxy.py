"""A TCP proxy between the pipeline and the service that applies planned faults, with one request per connection.

A fault is a coroutine that gets the request (`Exchange`): it may pass it on, cut it off, or answer it itself.
`Proxy.play` chooses the requests and their faults, one after the other; all other requests pass.
"""

import asyncio
import json
import re
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

HEAD_END = b"\r\n\r\n"
RESET = struct.pack("ii", 1, 0)
BLOCK = 16_384


@dataclass
class Exchange:
    """A request whose head has been read but whose body has not, and the port of the service."""

    head: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    service_port: int

    @property
    def length(self) -> int:
        """The length of the request's body in bytes."""
        found = re.search(rb"\r\ncontent-length: *(\d+)", self.head, re.IGNORECASE)
        return int(found[1]) if found else 0

    async def pass_on(self, count: int | None = None) -> bytes:
        """Pass the request on and return the answer; with `count`, send only so much of the body and get no answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.service_port)
        try:
            await self.send_to(writer, count)
            if count is None:
                return await reader.read()
            reset(writer)
            return b""
        finally:
            writer.close()

    async def send_to(self, writer: asyncio.StreamWriter, count: int | None = None) -> None:
        """Send the request to the service; with `count` only so many bytes of its body."""
        wanted = self.length if count is None else count
        writer.write(re.sub(rb"(?i)(\r\nconnection: )[^\r]*", rb"\1close", self.head))
        while wanted and (block := await self.reader.read(min(wanted, BLOCK))):
            writer.write(block)
            await writer.drain()
            wanted -= len(block)

    async def answer(self, content: bytes) -> None:
        """Send bytes to the client."""
        self.writer.write(content)
        await self.writer.drain()

    async def swallow(self) -> None:
        """Read the whole body, so that the client waits for its answer."""
        await self.reader.readexactly(self.length)


Fault = Callable[[Exchange], Awaitable[None]]


@dataclass
class Rule:
    """The requests that `wanted` selects get these faults, one each; with `for_ever`, all of them get the first one."""

    wanted: Callable[[str, str], bool]
    faults: list[Fault]
    for_ever: bool


class Proxy:
    """A proxy that listens on a free port inside its `with` block."""

    def __init__(self, service_port: int) -> None:
        """Forward to a service on this port of the same host."""
        self._service_port = service_port
        self._rules: list[Rule] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        """Start to listen."""
        self._thread.start()
        self._server = self.run(asyncio.start_server(self._begin, "127.0.0.1", 0))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening and cancel all open exchanges."""
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def port(self) -> int:
        """The port on which the proxy listens."""
        return self._server.sockets[0].getsockname()[1]

    def play(self, method: str, path: str, faults: Sequence[Fault], for_ever: bool = False) -> None:
        """Plan faults for requests whose whole method and path match; earlier plans take precedence."""
        pattern = re.compile(path)

        def wanted(asked: str, target: str) -> bool:
            return (
                re.fullmatch(method, asked) is not None
                and pattern.fullmatch(target.partition("?")[0]) is not None
            )

        self._rules.append(Rule(wanted, list(faults), for_ever))

    def heal(self) -> None:
        """Let all further requests pass."""
        self._rules.clear()

    def run(self, work: Any) -> Any:
        """Run a coroutine in the proxy's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _close(self) -> None:
        self._server.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for one in others:
                one.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection, and close it even if the proxy ends before its task has begun."""
        serving = self._loop.create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        serving.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(HEAD_END)
            method, target, _ = head.decode("latin-1").split(" ", 2)
            await self._fault(method, target)(Exchange(head, reader, writer, self._service_port))
            await writer.drain()

    def _fault(self, method: str, target: str) -> Fault:
        for rule in self._rules:
            if rule.faults and rule.wanted(method, target):
                return rule.faults[0] if rule.for_ever else rule.faults.pop(0)
        return passed


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection by a reset (RST instead of FIN)."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


async def passed(exchange: Exchange) -> None:
    """Pass a request without a fault; the answer passes in pieces, so that a stream starts before it is complete."""
    reader, writer = await asyncio.open_connection("127.0.0.1", exchange.service_port)
    try:
        await exchange.send_to(writer)
        while block := await reader.read(BLOCK):
            await exchange.answer(block)
    finally:
        writer.close()


def canned(status: int, body: object = None, **headers: str) -> Fault:
    """A fault that answers without the service; a `str` is sent as it is, anything else as JSON."""
    content = (body if isinstance(body, str) else json.dumps(body)).encode()
    kind = "text/html" if isinstance(body, str) else "application/json"
    lines = [
        f"HTTP/1.1 {status} Changed",
        f"Content-Type: {kind}",
        f"Content-Length: {len(content)}",
    ]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    whole = "\r\n".join([*lines, "Connection: close"]).encode() + HEAD_END + content

    async def fault(exchange: Exchange) -> None:
        await exchange.swallow()
        await exchange.answer(whole)

    return fault


def refused(status: int, code: str, **headers: str) -> Fault:
    """A fault that answers with a refusal in the service's format."""
    error = {"code": code, "message": "refused", "type": code, "param": None, "details": []}
    return canned(status, {"error": error}, **headers)


def cut_request(share: float) -> Fault:
    """A fault that passes on this share of the body and then resets; with 1, the service carries out the request."""

    async def fault(exchange: Exchange) -> None:
        if share < 1:
            await exchange.pass_on(int(exchange.length * share))
        else:
            await exchange.pass_on()
        reset(exchange.writer)

    return fault


def cut_answer(share: float) -> Fault:
    """A fault that passes on this share of the answer's body and then closes the connection."""

    async def fault(exchange: Exchange) -> None:
        head, _, body = (await exchange.pass_on()).partition(HEAD_END)
        await exchange.answer(head + HEAD_END + body[: int(len(body) * share)])

    return fault


async def reset_unheard(exchange: Exchange) -> None:
    """A fault that reads the request and resets the connection; none of it reaches the service."""
    await exchange.swallow()
    reset(exchange.writer)


def lost(acted: threading.Event) -> Fault:
    """A fault that withholds the answer after the service has acted, until the client disconnects."""

    async def fault(exchange: Exchange) -> None:
        await exchange.pass_on()
        acted.set()
        await exchange.reader.read()

    return fault


async def half_open(exchange: Exchange) -> None:
    """A fault that accepts the connection and never answers."""
    await exchange.reader.read(-1)


def trickled(pause_s: float = 0.001) -> Fault:
    """A fault that sends the complete answer byte by byte."""

    async def fault(exchange: Exchange) -> None:
        answer = await exchange.pass_on()
        for place in range(len(answer)):
            await exchange.answer(answer[place : place + 1])
            await asyncio.sleep(pause_s if place % 64 == 0 else 0)

    return fault


def rewritten(change: Callable[[dict[str, Any]], object]) -> Fault:
    """A fault that changes the JSON of the service's answer: `change` edits it in place or returns another text."""

    async def fault(exchange: Exchange) -> None:
        head, _, body = (await exchange.pass_on()).partition(HEAD_END)
        content: dict[str, Any] = json.loads(body)
        other = change(content)
        encoded = other.encode() if isinstance(other, str) else json.dumps(content).encode()
        head = re.sub(rb"(?i)\r\ncontent-length: *\d+", b"", head)
        size = f"\r\nContent-Length: {len(encoded)}".encode()
        await exchange.answer(head + size + HEAD_END + encoded)

    return fault


def merged(fields: Mapping[str, object]) -> Callable[[dict[str, Any]], None]:
    """Return a change for `rewritten` that sets these fields."""
    return lambda content: content.update(fields)
