"""The leader's end of the connection to the agent of a training. See `training_protocol.py` for the messages."""

import asyncio
import logging
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tuneship.agents.agent_files import send_pieces, sorted_files, write_piece
from tuneship.agents.agent_link import AgentAccess, connected
from tuneship.agents.agent_protocol import LEADER, AgentAddress
from tuneship.agents.agent_sockets import Silence, encoded
from tuneship.agents.training_protocol import TrainOrder
from tuneship.host.durable import flush
from tuneship.host.thread_pools import Threads
from tuneship.serving.replica_client import ReplicaLost, ReplicaRefused, read_frame

logger = logging.getLogger(__name__)

# The agent reads the whole base model before it is ready, and tests the isolation.
READY_S = 600.0
ANSWER_S = 15.0
# An agent that was ordered to stop answers when the process is gone.
STOP_S = 4.0


class TrainingRefused(Exception):
    """The node cannot run the training; the text says why."""


class TrainingAgentLost(Exception):
    """The connection to the agent is lost or broken; the training may still run."""


@dataclass(frozen=True)
class AgentNews:
    """The progress of a training, as its agent reports it."""

    # Complete progress lines.
    lines: str
    # How the process ended; None while it runs.
    exit_code: int | None
    # The step of the newest checkpoint; 0 if there is none.
    step: int


class AgentTrainingLink:
    """Requests to the agent of a training."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        threads: Threads,
        on_renew: Callable[[int], Awaitable[bool]],
        *,
        heartbeat_s: float,
    ) -> None:
        """Call `open` instead."""
        self._writer = writer
        self._threads = threads
        self._on_renew = on_renew
        self._ids = count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._renewing: asyncio.Task[None] | None = None
        self._is_lost = False
        self._silence = Silence(heartbeat_s)
        self._watch_task = asyncio.create_task(self._watch())
        self._read_task = asyncio.create_task(self._read(reader))

    @classmethod
    async def open(
        cls,
        address: AgentAddress,
        access: AgentAccess,
        threads: Threads,
        on_renew: Callable[[int], Awaitable[bool]],
    ) -> "AgentTrainingLink":
        """Connect. Raises `TrainingRefused` and `TrainingAgentLost`.

        `on_renew`: extends the job's lease and returns whether the agent may go on; it is called with the number of
        each request. `threads`: for files.
        """
        try:
            reader, writer, _ = await connected(address, access, LEADER)
        except ReplicaRefused as error:
            raise TrainingRefused(str(error)) from error
        except ReplicaLost as error:
            raise TrainingAgentLost(str(error)) from error
        return cls(reader, writer, threads, on_renew, heartbeat_s=access.timing.heartbeat_s)

    @property
    def is_lost(self) -> bool:
        """Whether the connection is lost."""
        return self._is_lost

    async def warm(self, base: Path, *, isolated: bool) -> None:
        """Have the agent start a process that waits for its order with its libraries loaded.

        `base`, `isolated`: as the order will say. Raises `TrainingAgentLost`.
        """
        path = str(base.absolute())  # noqa: ASYNC240 - it asks no disk
        await self._send({"op": "warm", "base": path, "isolated": isolated})

    async def send_folder(self, folder: Path, name: str) -> None:
        """Send all files of a folder, which will be in a folder of this name. Raises as `send_file` does."""
        for file in await self._threads.run(sorted_files, folder):
            await self.send_file(file, f"{name}/{file.name}")

    async def send_file(self, file: Path, path: str) -> None:
        """Send a file as it is. Raises `OSError` and `TrainingAgentLost`."""
        await send_pieces(
            file,
            self._threads,
            lambda content: self._send({"op": "file", "path": path, "content": content}),
        )

    async def train(self, order: TrainOrder) -> None:
        """Order the training and wait until the agent is ready; it starts when the lease is first renewed.

        Raises `TrainingRefused` and `TrainingAgentLost`.
        """
        await self._send(order.to_frame())
        try:
            async with asyncio.timeout(READY_S):
                await self._ready
        except TimeoutError:
            raise TrainingAgentLost("the agent does not become ready") from None

    async def news(self, offset: int, step: int, wait_s: float) -> AgentNews:
        """Wait for lines after the offset, a checkpoint after the step, or the end. Raises `TrainingAgentLost`."""
        patience_s = wait_s + ANSWER_S
        answer = await self._call("news", patience_s, offset=offset, step=step, wait_s=wait_s)
        return AgentNews(answer["lines"], answer["exit_code"], answer["step"])

    async def hold(self, what: str) -> tuple[int, Mapping[str, int]]:
        """Have the agent keep files until the next call; return their step and sizes. Raises `TrainingAgentLost`."""
        answer = await self._call("hold", what=what)
        return answer["step"], answer["files"]

    async def fetch(self, what: str, files: Mapping[str, int], folder: Path) -> None:
        """Copy files that the agent holds to an empty folder, flushed to the disk.

        Raises `OSError` and `TrainingAgentLost`.
        """
        for name, size in files.items():
            target, offset = folder / Path(name).name, 0
            await self._threads.run(target.touch)
            while offset < size:
                answer = await self._call("piece", what=what, name=name, offset=offset)
                piece = b64decode(answer["content"])
                if not piece:
                    raise TrainingAgentLost("a file of the agent is shorter than it was")
                await self._threads.run(write_piece, target, offset, piece)
                offset += len(piece)
            await self._threads.run(flush, target)

    async def cancel(self) -> None:
        """Ask the process to stop after its current step. Raises `TrainingAgentLost`."""
        await self._send({"op": "cancel"})

    async def stop(self) -> None:
        """Have the process killed and wait until it has ended. Raises `TrainingAgentLost` when that cannot be
        confirmed.
        """
        try:
            async with asyncio.timeout(STOP_S):
                await self._call("stop")
        except TimeoutError:
            raise TrainingAgentLost("the agent does not stop") from None

    async def aclose(self) -> None:
        """Disconnect."""
        self._lose()
        self._watch_task.cancel()
        self._read_task.cancel()
        if self._renewing is not None:
            self._renewing.cancel()
        with suppress(asyncio.CancelledError):
            await self._read_task

    async def _call(
        self, operation: str, patience_s: float = ANSWER_S, /, **fields: Any
    ) -> dict[str, Any]:
        number = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            await self._send({"op": operation, "id": number, **fields})
            async with asyncio.timeout(patience_s):
                return await answer
        except TimeoutError:
            raise TrainingAgentLost("the agent is silent") from None
        finally:
            del self._answers[number]

    async def _send(self, frame: Mapping[str, Any]) -> None:
        if self._is_lost:
            raise TrainingAgentLost("the connection to the agent is lost")
        try:
            self._writer.write(encoded(frame))
            await self._writer.drain()
        except OSError as error:
            raise TrainingAgentLost(type(error).__name__) from error

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._handle(await read_frame(reader))
        except (ReplicaLost, KeyError, TypeError, ValueError, OSError) as error:
            if not self._is_lost:
                logger.warning("the connection to an agent is lost: %s", type(error).__name__)
        finally:
            self._lose()

    async def _watch(self) -> None:
        """Treat the connection as lost when nothing arrives over it; the training may still run."""
        await self._silence.begun()
        if not self._is_lost:
            logger.warning("the agent of a training is silent")
            self._lose()

    def _handle(self, frame: dict[str, Any]) -> None:
        self._silence.has_heard = True
        if "renew" in frame:
            # A later one extends more; a database that does not answer must not gather them.
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.create_task(self._renew(int(frame["renew"])))
        elif "refused" in frame or "ready" in frame:
            if self._ready.done():
                return
            if "ready" in frame:
                self._ready.set_result(None)
            else:
                self._ready.set_exception(TrainingRefused(str(frame["refused"])))
        elif (answer := self._answers.get(frame.get("id", -1))) is not None and not answer.done():
            answer.set_result(frame)

    async def _renew(self, number: int) -> None:
        if await self._on_renew(number):
            with suppress(TrainingAgentLost):
                await self._send({"op": "renewed", "number": number})

    def _lose(self) -> None:
        self._is_lost = True
        self._writer.transport.abort()
        for waiting in (self._ready, *self._answers.values()):
            if not waiting.done():
                waiting.set_exception(TrainingAgentLost("the connection to the agent is lost"))
                waiting.exception()  # nobody may be waiting any more
