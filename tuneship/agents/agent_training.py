"""The agent of one training: runs the process on its node while the leader renews the lease, and hands out its files.

The leader alone decides; everything that it needs to know can be asked for again after the connection was lost. See
`training_protocol.py` for the messages and the lease.
"""

import asyncio
import json
import logging
import os
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from tuneship.agents.agent_files import append_piece, is_file_name, read_piece
from tuneship.agents.agent_protocol import (
    LEADER,
    PROTOCOL,
    CannotServe,
    NotUnderstood,
)
from tuneship.agents.agent_sockets import encoded, limit_silence
from tuneship.agents.base_digest import check_base
from tuneship.agents.training_protocol import (
    ADAPTER,
    ASK_EVERY_S,
    ATTEMPT,
    CHECKPOINTS,
    COMPARED,
    INPUTS,
    LEASE_S,
    SENT,
    TrainOrder,
)
from tuneship.host.deadline_file import elapsed_s, write_deadline
from tuneship.host.thread_pools import Threads
from tuneship.isolation.landlock import Places
from tuneship.processes.worker_processes import LocalProcesses
from tuneship.processes.worker_protocol import Worker, WorkerSpec
from tuneship.training.checkpoint_folders import give_second_names, latest_step
from tuneship.training.spec import (
    CANCEL_FILE,
    LEASE_FILE,
    PROGRESS_FILE,
    SPEC_FILE,
    Order,
    TrainingSpec,
)

logger = logging.getLogger(__name__)

Frame = dict[str, Any]
HELLO_PATIENCE_S = 5.0
CLOSE_PATIENCE_S = 1.0
# Between two looks for news.
LOOK_S = 0.2
HEARTBEAT = encoded({"heartbeat": True})
# The process writes where the agent does.
LOG = Path("/dev/stderr")
# Exit code of a training whose process could not be started.
NOT_STARTED = 71


class AgentLease:
    """The right to let the training process compute. Begins without."""

    def __init__(self, clock: Callable[[], float] = elapsed_s) -> None:
        """`clock`: seconds, which must count while the machine sleeps."""
        self._clock = clock
        # The moments of the requests that may still be answered.
        self._asked: dict[int, float] = {}
        self._numbers = count()
        self._ask_at = 0.0
        # The end by the clock; None until it was first renewed.
        self.until: float | None = None

    def ask(self) -> int | None:
        """The number of the next request to renew; None while it is not time."""
        now = self._clock()
        if now < self._ask_at:
            return None
        self._ask_at, number = now + ASK_EVERY_S, next(self._numbers)
        # A later answer would extend nothing.
        self._asked = {one: at for one, at in self._asked.items() if at + LEASE_S > now}
        self._asked[number] = now
        return number

    def renew(self, number: int) -> None:
        """Extend it from the moment of the request on, however late the answer is."""
        if number in self._asked:
            self.until = max(self.until or 0.0, self._asked[number] + LEASE_S)

    @property
    def is_over(self) -> bool:
        """Whether it has lapsed."""
        return self.until is not None and self._clock() > self.until


@dataclass(frozen=True)
class WaitingProcess:
    """A training process that computes nothing before it reads its order from a pipe."""

    base: Path
    isolated: bool
    worker: Worker
    # The end to write to.
    pipe: int

    def fits(self, base: Path, *, isolated: bool) -> bool:
        """Whether it still waits, and may read this base model."""
        return (self.base, self.isolated) == (base, isolated) and self.worker.exit_code() is None

    def take(self, order: Order) -> Worker:
        """Hand it the order. Raises `OSError` if it has just ended."""
        try:
            os.write(self.pipe, order.to_line().encode())
        finally:
            os.close(self.pipe)
        return self.worker

    def end(self) -> None:
        """End it without an order."""
        os.close(self.pipe)
        self.worker.kill()


class AgentTraining:
    """Obeys the leader of one training. The counterpart of `AgentRelay` for trainings."""

    def __init__(self, folder: Path, version: str, check_isolation: Callable[[Path], None]) -> None:
        """`folder`: for all files of the training. `check_isolation`: raises `CannotServe` for a base model."""
        self._folder = folder
        self._attempt = folder / ATTEMPT
        self._version = version
        self._check_isolation = check_isolation
        self._threads = Threads("files of a training", 2)
        self._lease = AgentLease()
        self._order: TrainOrder | None = None
        self._spec: TrainingSpec | None = None
        # Why the files that came cannot be used.
        self._fault: str | None = None
        self._waiting: WaitingProcess | None = None
        # The process that has its order.
        self._worker: Worker | None = None
        self._is_unstartable = False
        self._leader: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Set when the agent is to end.
        self.over = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """Whether a leader is connected."""
        return self._leader is not None

    def send_heartbeat(self) -> None:
        """Send the leader a sign of life, and ask it to renew the lease; end the process when that is over."""
        if self._lease.is_over:
            logger.warning("the lease of a training is over")
            self.end()
            self.over.set()
            return
        self._send(HEARTBEAT)
        if self._spec is not None and self.is_connected:
            number = self._lease.ask()
            if number is not None:
                self._send(encoded({"renew": number}))

    def end(self) -> None:
        """Kill the process and wait until it has ended."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.end()
        if self._worker is not None:
            self._worker.kill()

    async def close(self) -> None:
        """Kill the process, and disconnect."""
        self.end()
        if self._leader is not None:
            self._leader.close()
            with suppress(OSError, TimeoutError):  # also one of TLS
                async with asyncio.timeout(CLOSE_PATIENCE_S):
                    await self._leader.wait_closed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Obey the leader until it disconnects."""
        try:
            limit_silence(writer)
            async with asyncio.timeout(HELLO_PATIENCE_S):
                self._greet(json.loads(await reader.readline()), writer)
            while (line := await reader.readline()).endswith(b"\n"):
                await self._obey(json.loads(line), writer)
        except (OSError, TimeoutError):  # it is gone, or said nothing
            pass
        except (NotUnderstood, KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("a service broke the protocol: %s", type(error).__name__)
        finally:
            if self._leader is writer:
                self._leader = None
            writer.close()

    def _greet(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        if frame["op"] != "hello" or frame["role"] != LEADER:
            raise NotUnderstood
        if frame["protocol"] != PROTOCOL:
            writer.write(encoded({"refused": f"the agent speaks version {PROTOCOL}"}))
            raise NotUnderstood
        if self._leader is not None:  # it has lost that connection before the agent has
            self._leader.transport.abort()
        self._leader = writer
        self._send(encoded({"hello": {"version": self._version, "prefix": ""}}))

    def _send(self, line: bytes) -> None:
        if self._leader is not None and not self._leader.transport.is_closing():
            self._leader.write(line)

    def _answer(self, leader: asyncio.StreamWriter, frame: Frame, **fields: Any) -> None:
        # Only over the connection that has asked: on another one the same id stands for another question.
        if not leader.transport.is_closing():
            leader.write(encoded({"id": frame["id"], **fields}))

    async def _obey(self, frame: Frame, leader: asyncio.StreamWriter) -> None:
        """Carry out a message that came over the connection of `leader`. Raises `NotUnderstood` and the like."""
        match frame["op"]:
            case "file":
                await self._threads.run(self._keep_piece, frame)
            case "warm":
                self._warm_up(Path(frame["base"]), isolated=bool(frame["isolated"]))
            case "train":
                await self._take_order(TrainOrder.from_frame(frame))
            case "renewed":
                self._renew(int(frame["number"]))
            case "news":
                task = asyncio.create_task(self._answer_with_news(frame, leader))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "hold":
                step, files = await self._threads.run(self._hold, frame["what"])
                self._answer(leader, frame, step=step, files=files)
            case "piece":
                piece = await self._threads.run(self._piece, frame)
                self._answer(leader, frame, content=b64encode(piece).decode())
            case "cancel":
                await self._threads.run((self._attempt / CANCEL_FILE).touch)
            case "stop":
                self.end()
                self._answer(leader, frame)
                self.over.set()
            case _:
                raise NotUnderstood

    # Before the start.

    def _keep_piece(self, frame: Frame) -> None:
        """Append a piece to a file. Raises `NotUnderstood` for a path that leads elsewhere."""
        parts = str(frame["path"]).split("/")
        if parts[0] not in (INPUTS, CHECKPOINTS) or not all(is_file_name(part) for part in parts):
            raise NotUnderstood
        content, file = b64decode(frame["content"], validate=True), self._folder.joinpath(*parts)
        try:
            append_piece(file, content)
        except OSError as error:  # the disk is full, say
            self._fault = f"the node cannot keep the files of the training: {error.strerror}"

    async def _take_order(self, order: TrainOrder) -> None:
        if self._order is not None:
            raise NotUnderstood
        self._order = order
        try:
            self._spec = await self._threads.run(self._prepared, order)
        except CannotServe as error:
            self._send(encoded({"refused": str(error)}))
            return
        self._send(encoded({"ready": {}}))
        self.send_heartbeat()

    def _prepared(self, order: TrainOrder) -> TrainingSpec:
        """Check the node's files, and write the files that the process reads. Raises `CannotServe`."""
        base = Path(order.base)
        if self._fault is not None:
            raise CannotServe(self._fault)
        check_base(base, order.digest)
        if order.isolated:
            self._check_isolation(base)
        spec = TrainingSpec.from_json(order.spec)
        inputs, validation = self._folder / INPUTS, spec.validation_file
        own = replace(
            spec,
            base_model=order.base,
            training_file=inputs / "training" / spec.training_file.name,
            validation_file=None if validation is None else inputs / "validation" / validation.name,
            output_dir=self._attempt / "output",
            checkpoint_dir=self._folder / CHECKPOINTS,
            compared_adapter=None if spec.compared_adapter is None else inputs / COMPARED,
        )
        try:
            for folder in (self._attempt, own.output_dir, own.checkpoint_dir):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._attempt / SPEC_FILE).write_text(own.to_json())
        except OSError as error:
            text = f"the node cannot keep the files of the training: {error.strerror}"
            raise CannotServe(text) from error
        return own

    # The process.

    def _renew(self, number: int) -> None:
        """Extend the lease; the first lease also hands the order to the process. Runs on the main thread, as a start
        must.
        """
        self._lease.renew(number)
        if self._spec is None or self._order is None or self._lease.until is None:
            return
        try:
            write_deadline(self._attempt / LEASE_FILE, self._lease.until)
            if self._worker is None and not self._is_unstartable and not self._lease.is_over:
                self._worker = self._started(self._order)
        except OSError as error:  # a process that runs goes by the deadline before
            logger.warning("a training cannot be started or continued: %s", error.strerror)
            self._is_unstartable = self._worker is None

    def _warm_up(self, base: Path, *, isolated: bool) -> None:
        """Start a process that waits for its order. Runs on the main thread, as every start must."""
        if self._waiting is None and self._worker is None:
            try:
                self._waiting = self._waiting_process(base, isolated=isolated)
            except OSError as error:  # it is tried again with the order
                logger.warning("a training process cannot be started: %s", error.strerror)

    def _started(self, order: TrainOrder) -> Worker:
        """Hand the order to the waiting process, or to a new one. Raises `OSError`."""
        base, isolated = Path(order.base), order.isolated
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.fits(base, isolated=isolated):
            waiting.end()
            waiting = None
        if waiting is None:
            waiting = self._waiting_process(base, isolated=isolated)
        return waiting.take(Order(self._attempt, order.keys))

    def _waiting_process(self, base: Path, *, isolated: bool) -> WaitingProcess:
        inputs, checkpoints = self._folder / INPUTS, self._folder / CHECKPOINTS
        for folder in (inputs, self._attempt, checkpoints):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reader, writer = os.pipe()
        try:
            spec = WorkerSpec(
                "tuneship.training",
                ("--wait", str(reader)),
                LOG,
                inherited=(reader,),
                places=Places((base, inputs), (self._attempt, checkpoints), uses_gpus=True),
            )
            worker = LocalProcesses(isolated=isolated).start(spec)
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        return WaitingProcess(base, isolated, worker, writer)

    # Its files.

    async def _answer_with_news(self, frame: Frame, leader: asyncio.StreamWriter) -> None:
        """Answer as soon as there is news for the leader, or when it has waited long enough."""
        loop = asyncio.get_running_loop()
        latest = loop.time() + float(frame["wait_s"])
        while True:
            # Asked before reading: a process that has ended writes nothing more.
            if self._worker is not None:
                exit_code = self._worker.exit_code()
            else:
                exit_code = NOT_STARTED if self._is_unstartable else None
            lines, step = await self._threads.run(self._look, int(frame["offset"]))
            is_new = lines or exit_code is not None or step > int(frame["step"])
            if is_new or loop.time() > latest:
                break
            await asyncio.sleep(LOOK_S)
        self._answer(leader, frame, lines=lines, exit_code=exit_code, step=step)

    def _look(self, offset: int) -> tuple[str, int]:
        """Complete lines from the offset on, and the step of the newest checkpoint."""
        step = latest_step(self._folder / CHECKPOINTS)
        try:
            piece = read_piece(self._attempt / PROGRESS_FILE, offset)
        except FileNotFoundError:
            return "", step
        return piece[: piece.rfind(b"\n") + 1].decode(), step

    def _hold(self, what: str) -> tuple[int, dict[str, int]]:
        """Keep the files of the newest checkpoint or of the adapter; return its step and the sizes of its files."""
        if what == ADAPTER:
            return 0, _sizes(self._place_of(what))
        step = latest_step(self._folder / CHECKPOINTS)
        if not give_second_names(self._folder / CHECKPOINTS, step, self._place_of(what)):
            return 0, {}
        return step, _sizes(self._place_of(what))

    def _piece(self, frame: Frame) -> bytes:
        name = str(frame["name"])
        if not is_file_name(name):
            raise NotUnderstood
        return read_piece(self._place_of(frame["what"]) / name, int(frame["offset"]))

    def _place_of(self, what: str) -> Path:
        return self._attempt / "output" / ADAPTER if what == ADAPTER else self._folder / SENT


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
