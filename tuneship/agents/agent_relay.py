"""The agent of one replica between the services that connect and the socket pair of the replica's process.

Every request has an id that begins with the number of its connection, so what the process sends is passed on as it is
while one service is connected, and divided when there are several. Control messages are obeyed from the leader with
the highest epoch alone. See `agent_protocol.py` for the messages.
"""

import asyncio
import json
import logging
import shutil
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from tuneship.agents.agent_files import append_piece, is_file_name
from tuneship.agents.agent_protocol import (
    GATEWAY,
    LEADER,
    PROTOCOL,
    CannotServe,
    NotUnderstood,
    ServeOrder,
)
from tuneship.agents.agent_sockets import encoded, limit_silence
from tuneship.host.thread_pools import Threads

logger = logging.getLogger(__name__)

Frame = dict[str, Any]
HELLO_PATIENCE_S = 5.0
CLOSE_PATIENCE_S = 1.0
# A service that reads nothing is given up before what waits for it fills the memory.
MAX_UNSENT_BYTES = 64 << 20
CONTROL = {"serve", "stop", "unload"}
ASKING = {"generate", "embed"}
# Entries of a frame of tokens or of embeddings begin with the id of their request.
DIVIDED = ("tokens", "finished", "scores", "prompt_scores", "embedded")


class ServiceConnection:
    """A service that said hello."""

    def __init__(
        self, number: int, hello: Frame, writer: asyncio.StreamWriter, folder: Path
    ) -> None:
        """`folder`: where received files are stored. Raises `KeyError` and `ValueError` for a bad message."""
        self.prefix = str(number)
        self.role, self.epoch = str(hello["role"]), int(hello["epoch"])
        if self.role not in (LEADER, GATEWAY):
            raise ValueError("no such role")
        self.folder = folder / self.prefix
        # Requests that have not ended, with the number of embeddings that are missing.
        self.in_flight: dict[str, int] = {}
        # Folders that could not take all files: the replica will not find them, and refuse the adapter.
        self.unwritten: set[Path] = set()
        self._writer = writer

    def send(self, line: bytes) -> None:
        """Send a message, or disconnect a service that does not read."""
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            logger.warning("a service that reads nothing was disconnected")
            self._writer.transport.abort()
        elif not self._writer.transport.is_closing():
            self._writer.write(line)

    async def close(self) -> None:
        """Disconnect when everything is sent."""
        self._writer.close()
        with suppress(OSError):  # also one of TLS
            await self._writer.wait_closed()


class AgentRelay:
    """Passes messages between services and one replica."""

    def __init__(
        self,
        folder: Path,
        version: str,
        start: Callable[[ServeOrder], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]],
    ) -> None:
        """`folder`: for the files of adapters. `start`: starts the replica's process, or raises `CannotServe`."""
        self._folder = folder
        self._version = version
        self._start = start
        self._numbers = count(1)
        self._epoch = 0
        self._connections: dict[str, ServiceConnection] = {}
        # Those that wait to hear how the replica started.
        self._waiting: list[ServiceConnection] = []
        self._transfers: dict[str, Path] = {}
        # The adapters that the replica has.
        self._loaded: set[str] = set()
        # Operation and adapter of the requests to load or unload one.
        self._changing: dict[str, tuple[str, str]] = {}
        # By request that loads an adapter: the other requests for the same one, with their messages.
        self._also_loading: dict[str, list[tuple[str, bytes]]] = {}
        self._order: ServeOrder | None = None
        self._outcome: Frame | None = None
        self._to_replica: asyncio.StreamWriter | None = None
        self._replica: asyncio.Task[None] | None = None
        self._threads = Threads("files of an adapter", 1)
        # Set when the agent is to end.
        self.over = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """Whether any service is connected."""
        return bool(self._connections)

    def send_heartbeat(self) -> None:
        """Let all services know that the agent lives, and each how many requests of others are in flight."""
        total = sum(len(connection.in_flight) for connection in self._connections.values())
        for connection in self._connections.values():
            others = total - len(connection.in_flight)
            connection.send(encoded({"heartbeat": {"others": others}}))

    async def close(self) -> None:
        """Disconnect all services when everything is sent, or after a second."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_PATIENCE_S):
                await asyncio.gather(*(one.close() for one in self._connections.values()))

    # From services.

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Obey one service until it disconnects, then cancel its requests in flight."""
        connection = None
        try:
            limit_silence(writer)
            async with asyncio.timeout(HELLO_PATIENCE_S):
                connection = self._greet(json.loads(await reader.readline()), writer)
            async for line in _lines(reader):
                await self._obey(connection, json.loads(line), line)
        except (OSError, TimeoutError):  # it is gone, or said nothing
            pass
        except (NotUnderstood, KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("a service broke the protocol: %s", type(error).__name__)
        finally:
            if connection is not None:
                self._connections.pop(connection.prefix, None)
                for identifier in connection.in_flight:
                    self._send(encoded({"op": "cancel", "id": identifier}))
                shutil.rmtree(connection.folder, ignore_errors=True)
            writer.close()

    def _greet(self, frame: Frame, writer: asyncio.StreamWriter) -> ServiceConnection:
        if frame["op"] != "hello":
            raise NotUnderstood
        connection = ServiceConnection(next(self._numbers), frame, writer, self._folder)
        if frame["protocol"] != PROTOCOL:
            connection.send(encoded({"refused": f"the agent speaks version {PROTOCOL}"}))
            raise NotUnderstood
        if connection.role == LEADER and connection.epoch < self._epoch:
            connection.send(encoded({"refused": "a later leader has come"}))
            raise NotUnderstood
        if connection.role == LEADER:
            self._epoch = connection.epoch
        self._connections[connection.prefix] = connection
        greeting = {"version": self._version, "prefix": connection.prefix}
        connection.send(encoded({"hello": greeting}))
        if connection.role == GATEWAY:
            self._announce(connection)
        return connection

    async def _obey(self, connection: ServiceConnection, frame: Frame, line: bytes) -> None:
        """Carry out a message or pass it on. Raises `NotUnderstood` and the like."""
        operation = frame["op"]
        leads = connection.role == LEADER and connection.epoch == self._epoch
        if operation in CONTROL and not leads:
            answer = {"id": frame.get("id"), "error": "a later leader has come"}
            connection.send(encoded(answer))
        elif operation == "serve":
            order = ServeOrder.from_frame(frame)
            if self._order is None:
                self._order = order
                self._replica = asyncio.create_task(self._run_replica(order))
            if order == self._order:
                self._announce(connection)
            else:
                connection.send(encoded({"refused": "the agent serves something else"}))
        elif operation == "stop":
            self.over.set()
        elif operation == "file":
            await self._threads.run(self._keep_piece, connection, frame)
        else:
            self._request(connection, operation, frame, line)

    def _request(
        self, connection: ServiceConnection, operation: str, frame: Frame, line: bytes
    ) -> None:
        identifier = frame["id"]
        if _prefix(identifier) != connection.prefix:
            raise NotUnderstood
        if operation == "load":
            files = self._transfers[identifier] = _place(connection, frame["transfer"])
            line = encoded({**frame, "path": str(files)})
        if self._is_answered(connection, operation, frame, line):
            return
        if operation in ASKING:
            connection.in_flight[identifier] = len(frame.get("texts", ()))
        elif operation == "cancel":
            connection.in_flight.pop(identifier, None)
        elif operation not in ("load", "unload", "stats"):
            raise NotUnderstood
        if self._to_replica is None:
            connection.in_flight.pop(identifier, None)
            answer = {"id": identifier, "error": "the replica does not run", "lost": True}
            connection.send(encoded(answer))
        else:
            self._send(line)

    def _is_answered(
        self, connection: ServiceConnection, operation: str, frame: Frame, line: bytes
    ) -> bool:
        """Whether the known state of its adapters answers the request without asking the replica; also notes what will
        change.
        """
        identifier, adapter = frame["id"], frame.get("adapter")
        if operation == "load":
            return self._is_loaded_anyway(identifier, str(frame["adapter"]), line)
        answer: Frame | None = None
        if operation == "loaded":
            answer = {"loaded": adapter in self._loaded}
        elif operation == "unload" and adapter not in self._loaded:
            answer = {"ok": True}
        elif operation == "unload":
            self._changing[identifier] = operation, str(adapter)
            self._loaded.discard(str(adapter))  # at once: what is asked now comes later
        elif operation in ASKING and not (adapter is None or adapter in self._loaded):
            text = "another service has unloaded the adapter"
            answer = {"error": text, "lost": True, "unloaded": adapter}
        if answer is not None:
            connection.send(encoded({"id": identifier, **answer}))
        return answer is not None

    def _is_loaded_anyway(self, identifier: str, adapter: str, line: bytes) -> bool:
        """Whether the adapter is loaded already, or another request is loading it and will answer this one, too."""
        if adapter in self._loaded:
            self._answer(identifier, encoded({"id": identifier, "ok": True}))
            return True
        for other, change in self._changing.items():
            if change == ("load", adapter):
                self._also_loading.setdefault(other, []).append((identifier, line))
                return True
        self._changing[identifier] = "load", adapter
        return False

    def _keep_piece(self, connection: ServiceConnection, frame: Frame) -> None:
        """Append a piece to a file of an adapter. Raises `NotUnderstood` for a name that is none."""
        name, folder = str(frame["name"]), _place(connection, frame["transfer"])
        if not is_file_name(name):
            raise NotUnderstood
        content = b64decode(frame["content"], validate=True)
        if folder in connection.unwritten:
            return
        try:
            append_piece(folder / name, content)
        except OSError as error:  # the disk is full, say
            logger.warning("an adapter could not be written: %s", error.strerror)
            connection.unwritten.add(folder)
            shutil.rmtree(folder, ignore_errors=True)

    # The replica.

    def _announce(self, connection: ServiceConnection) -> None:
        """Send a service the outcome of the replica's start, as soon as it is known."""
        if self._outcome is None:
            self._waiting.append(connection)
        else:
            connection.send(encoded(self._outcome))

    async def _run_replica(self, order: ServeOrder) -> None:
        """Start the replica, announce the outcome, and pass on its messages until the replica and the agent end."""
        try:
            outcome, reader = await self._started(order)
            self._outcome = outcome
            while self._waiting:
                self._waiting.pop().send(encoded(outcome))
            if "ready" in outcome and reader is not None:
                async for line in _lines(reader):
                    self._pass_on(line)
        finally:
            self.over.set()
            if self._to_replica is not None:
                self._to_replica.close()
                self._to_replica = None

    async def _started(self, order: ServeOrder) -> tuple[Frame, asyncio.StreamReader | None]:
        try:
            reader, self._to_replica = await self._start(order)
            first = await reader.readline()
        except CannotServe as error:
            return {"refused": str(error)}, None
        except OSError as error:
            text = f"the replica could not be started: {type(error).__name__}"
            return {"refused": text}, None
        if not first:
            return {"refused": "the replica's process ended while it started"}, None
        return json.loads(first), reader

    def _pass_on(self, line: bytes) -> None:
        """Pass a message of the replica on to the services whose requests it answers."""
        frame: Frame = json.loads(line)
        identifier = frame.get("id")
        if identifier is not None:
            self._note_change(frame, identifier)
            self._answer(identifier, line)
            return
        self._note_ends(frame)
        if len(self._connections) == 1:
            for connection in self._connections.values():
                connection.send(line)
            return
        parts: dict[str, Frame] = {}
        # Services expect both of these in every message of tokens.
        always = ("tokens", "finished") if "tokens" in frame else ()
        for name in DIVIDED:
            for entry in frame.get(name, ()):
                part = parts.setdefault(_prefix(entry[0]), {key: [] for key in always})
                part.setdefault(name, []).append(entry)
        for prefix, part in parts.items():
            if (connection := self._connections.get(prefix)) is not None:
                connection.send(encoded(part))

    def _note_change(self, frame: Frame, identifier: str) -> None:
        """Update the list of loaded adapters after the replica has answered a request to load or unload one."""
        operation, adapter = self._changing.pop(identifier, ("", ""))
        others = self._also_loading.pop(identifier, [])
        is_refused = "error" in frame
        if operation and (operation == "load") != is_refused:
            self._loaded.add(adapter)
        if not is_refused:
            for other, _ in others:
                self._answer(other, encoded({**frame, "id": other}))
        elif others:  # the files of another one may be better
            (first, line), *rest = others
            self._changing[first] = operation, adapter
            self._also_loading[first] = rest
            self._send(line)

    def _answer(self, identifier: str, line: bytes) -> None:
        files = self._transfers.pop(identifier, None)
        if files is not None:  # they are in the replica's memory now
            shutil.rmtree(files, ignore_errors=True)
        if (connection := self._connections.get(_prefix(identifier))) is not None:
            connection.in_flight.pop(identifier, None)
            connection.send(line)

    def _note_ends(self, frame: Frame) -> None:
        for identifier, _ in frame.get("finished", ()):
            if (connection := self._connections.get(_prefix(identifier))) is not None:
                connection.in_flight.pop(identifier, None)
        for identifier, *_ in frame.get("embedded", ()):
            connection = self._connections.get(_prefix(identifier))
            if connection is not None and identifier in connection.in_flight:
                connection.in_flight[identifier] -= 1
                if not connection.in_flight[identifier]:
                    del connection.in_flight[identifier]

    def _send(self, line: bytes) -> None:
        if self._to_replica is not None:
            self._to_replica.write(line)


def _prefix(identifier: str) -> str:
    """The number of the connection that a request came from."""
    return identifier.partition(":")[0]


def _place(connection: ServiceConnection, transfer: str) -> Path:
    """The folder for the files of one adapter. Raises `NotUnderstood` for a transfer of another connection."""
    number = transfer.removeprefix(f"{connection.prefix}:")
    if number == transfer or not number.isdecimal():
        raise NotUnderstood
    return connection.folder / number


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield complete lines until the stream ends."""
    while (line := await reader.readline()).endswith(b"\n"):
        yield line
