"""An HTTP server that receives webhooks for tests, answers as planned for each path, and keeps the requests."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpcore

from tests.support.waiting import until_disconnected
from tuneship.events.addresses import AddressRules, Network
from tuneship.events.connector import Receivers, resolve


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """A webhook receiver; `answers` has the whole answer for a path (None: no answer), and other paths get a 204."""

    port: int = 0
    received: list[Received] = field(default_factory=list)
    answers: dict[str, bytes | None] = field(default_factory=dict)
    # Server names that clients requested in TLS.
    server_names: list[str | None] = field(default_factory=list)
    # Whether answers wait until `speak` is set.
    is_silent: bool = False
    speak: asyncio.Event = field(default_factory=asyncio.Event)

    def url(self, path: str = "/", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            pairs = (line.split(": ", 1) for line in head[1:] if line)
            headers = {name.lower(): value for name, value in pairs}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            path = head[0].split()[1]
            self.received.append(Received(path, headers, body))
            answer = self.answers.get(path.partition("?")[0], b"HTTP/1.1 204 -\r\n\r\n")
            if self.is_silent:
                await self.speak.wait()
            if answer is None:
                await reader.read()  # until the caller gives up
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


def answer(status: int, *headers: str, body: bytes = b"") -> bytes:
    head = "".join(f"{one}\r\n" for one in (*headers, f"Content-Length: {len(body)}"))
    return f"HTTP/1.1 {status} -\r\n{head}\r\n".encode() + body


@asynccontextmanager
async def listening(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    if tls is not None:
        tls.sni_callback = lambda _, name, __: receiver.server_names.append(name)
    server = await asyncio.start_server(receiver.handle, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    async with server:
        yield receiver
    if tls is not None:
        await until_disconnected(server)


def opened(*names: str, cidrs: tuple[Network, ...] = (), **rules: object) -> AddressRules:
    """Make rules that allow plain HTTP to `names`, and any connection to `cidrs`."""
    return AddressRules(cidrs, frozenset(names), **rules)  # type: ignore[arg-type]


@dataclass
class Names:
    """A resolver with planned answers by host: one list of addresses for each call, the last one for all others."""

    answers: dict[str, list[list[str]]]

    def __call__(self, host: str, port: int) -> list[str]:
        planned = self.answers.get(host)
        if planned is None:
            return list(resolve(host, port))
        return planned.pop(0) if len(planned) > 1 else planned[0]


class RecordingNetwork(httpcore.AsyncNetworkBackend):
    """A network that makes real connections and records their hosts."""

    def __init__(self) -> None:
        self.connected: list[str] = []
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(self, host: str, *args: object, **options: object) -> object:  # type: ignore[override]
        self.connected.append(host)
        return await self._network.connect_tcp(host, *args, **options)  # type: ignore[arg-type]


def receivers(rules: AddressRules, **names: list[list[str]]) -> Receivers:
    """Make receivers; with `name=[[...]]`, the host `name.test` resolves to these addresses."""
    return Receivers(rules, Names({f"{name}.test": plan for name, plan in names.items()}))
