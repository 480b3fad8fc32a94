"""Trainings on other machines: an agent runs the process on its node, and everything it writes is copied here.

The files of an attempt go to its agent over the connection, and progress, checkpoints and the adapter come back into
the work folder of the job, as if the process had written them here. Whether the process may compute is decided by the
lease of the job: each time that its agent asks, the lease is extended in the database, and only then the agent hears it
(`tuneship/agents/training_protocol.py`). So nobody has to take over the trainings of a leader that is lost: they end
by themselves, and the next attempt goes on from the checkpoint.
"""

import asyncio
import logging
import math
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from tuneship.agents.agent_training_link import (
    AgentNews,
    AgentTrainingLink,
    TrainingAgentLost,
    TrainingRefused,
)
from tuneship.agents.launchers import AgentSize, CannotLaunch
from tuneship.agents.training_agents import TrainingAgent, TrainingAgents
from tuneship.agents.training_protocol import (
    ADAPTER,
    CHECKPOINT,
    CHECKPOINTS,
    COMPARED,
    GONE_S,
    TrainOrder,
)
from tuneship.host.thread_pools import Threads
from tuneship.service.jobs.launcher import Training, TrainingOrder, TrainingProgress
from tuneship.service.jobs.next_agents import NextAgents
from tuneship.service.jobs.stored_checkpoints import FOLDER
from tuneship.service.jobs.work_folders import OUTPUT, FolderTraining, PreparedAttempt, WorkFolders
from tuneship.store.database.database import Database
from tuneship.store.files.blobs import Blobs
from tuneship.store.records import job_leases
from tuneship.store.records.job_leases import JobLease, LeaseLost
from tuneship.training.checkpoint_folders import (
    KEPT,
    STEP,
    arriving_folder,
    latest_step,
    put_in_place,
    step_folder,
)
from tuneship.training.spec import PROGRESS_FILE

logger = logging.getLogger(__name__)

# The agent answers a request for news after this time at the latest.
NEWS_S = 5.0
RETRY_S = 1.0
# Exit code of a training whose agent is lost, so that nobody has reported how it ended.
LOST = 255
# Together for all trainings when the service ends; one whose end is not known then keeps its lease.
STOP_S = 2.0


class NodeTraining(FolderTraining):
    """A training on a node; its files are copied into the job's work folder."""

    def __init__(
        self,
        attempt: PreparedAttempt,
        threads: Threads,
        blobs: Blobs,
        next_agents: NextAgents,
        agent: TrainingAgent,
        extend: Callable[[], Awaitable[None]],
    ) -> None:
        """Call `begin` next. `agent`: one that listens and has no order.

        `next_agents` hears when it is lost. `extend`: extends the lease of the job, or raises `LeaseLost`.
        """
        super().__init__(attempt, threads, blobs)
        self._next, self._agents, self._agent = next_agents, next_agents.agents, agent
        self._extend = extend
        self._job_id = attempt.folder.parent.name
        self._link: AgentTrainingLink | None = None
        # When the agent was last allowed to go on; infinite before it may start.
        self._renewed_at = math.inf
        self._code: int | None = None
        # Bytes of progress that are here.
        self._offset = 0
        # The newest checkpoint that is here.
        self._step = 0
        self._is_to_stop = self._is_ended = False
        self._may_start = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    # Starting.

    async def begin(self, order: TrainingOrder) -> None:
        """Send the files and the order. After an error, as with `AgentTrainingLink.train`, nothing computes."""
        link, spec = await self._connected(), self.attempt.spec
        self._link = link
        await link.warm(order.base, isolated=self._agents.isolated)
        inputs = {"training": spec.training_file, "validation": spec.validation_file}
        for name, file in inputs.items():
            if file is not None:
                await link.send_file(file, f"inputs/{name}/{file.name}")
        if spec.compared_adapter is not None:
            await link.send_folder(spec.compared_adapter, f"inputs/{COMPARED}")
        self._step = await self.threads.run(latest_step, spec.checkpoint_dir)
        if self._step:
            newest = step_folder(spec.checkpoint_dir, self._step)
            await link.send_folder(newest, f"{CHECKPOINTS}/{newest.name}")
        # The number format that the first attempt chose.
        await link.send_folder(spec.checkpoint_dir, CHECKPOINTS)
        train = TrainOrder(
            base=str(order.base.absolute()),
            digest=spec.base_digest or "",
            isolated=self._agents.isolated,
            spec=spec.to_json(),
            keys=order.keys,
        )
        await link.train(train)
        # Nothing may be awaited from here on: a training that nobody knows of could not be waited for.
        self._renewed_at = time.monotonic()
        self._may_start.set()
        self._following = asyncio.create_task(self._follow(link))

    async def _connected(self) -> AgentTrainingLink:
        return await AgentTrainingLink.open(
            self._agent.address, self._agents.access(), self.threads, self._renew
        )

    # The lease.

    async def _renew(self, _number: int) -> bool:
        """Extend the lease of the job; the agent may go on if that is committed."""
        await self._may_start.wait()
        try:
            await self._extend()
        except LeaseLost:
            self._is_ended = True
        except Exception:  # the database is away: the agent asks again, and ends in time
            logger.exception("the lease of a training could not be extended")
            return False
        if self._is_ended:
            return False
        self._renewed_at = time.monotonic()
        return True

    @property
    def is_running(self) -> bool:
        """Whether the process may still compute."""
        return self.exit_code() is None

    def exit_code(self) -> int | None:
        """The exit code that the agent reported; `LOST` once the lease has been over so long that the process must have
        ended.
        """
        if self._code is None and time.monotonic() > self._renewed_at + GONE_S:
            logger.warning("the agent of a training is lost: %s", self._job_id)
            self._code = LOST
        return self._code

    # Following.

    async def _follow(self, link: AgentTrainingLink) -> None:
        """Copy progress until the end, reconnecting as needed."""
        while self._code is None:
            try:
                await self._copy(link)
            except TrainingAgentLost:  # perhaps it can be reached again
                await link.aclose()
                await asyncio.sleep(RETRY_S)
                link = await self._again(link)
            except (KeyError, TypeError, ValueError):
                logger.exception("the agent of a training broke the protocol")
                self._is_ended = True  # its lease is not renewed any more
                return
            except OSError:  # the disk is full, say: what was not copied is asked for again
                logger.exception("what a training wrote could not be copied")
                await asyncio.sleep(RETRY_S)

    async def _again(self, lost: AgentTrainingLink) -> AgentTrainingLink:
        """Connect once more; returns the lost connection where that fails, and has the next agent started."""
        try:
            self._link = await self._connected()
            if self._is_to_stop:
                await self._link.cancel()
        except (TrainingAgentLost, TrainingRefused):
            if not self._is_to_stop and not self._is_ended:
                base = Path(self.attempt.spec.base_model)
                self._next.prepare(self._job_id, base, self._agent.size)
            return lost
        self._next.drop(self._job_id)
        return self._link

    async def _copy(self, link: AgentTrainingLink) -> None:
        """Copy lines and checkpoints until the process has ended. Raises `TrainingAgentLost` and `OSError`."""
        copying, seen = None, self._step
        try:
            while True:
                news = await link.news(self._offset, seen, NEWS_S)
                seen = news.step
                if news.lines:
                    await self._copy_lines(link, news)
                elif news.exit_code is not None:
                    break
                if seen > self._step and (copying is None or copying.done()):
                    copying = asyncio.create_task(self._copy_checkpoint(link))
                    copying.add_done_callback(_note_failure)
        finally:
            if copying is not None:
                copying.cancel()
                await asyncio.wait([copying])
        if seen > self._step and not self._is_to_stop:
            await self._copy_checkpoint(link)  # for the next attempt
        self._code = news.exit_code

    async def _copy_lines(self, link: AgentTrainingLink, news: AgentNews) -> None:
        if '"kind": "completed"' in news.lines:
            # The line says that the adapter is there.
            _, files = await link.hold(ADAPTER)
            arriving, final = self.folder / "arriving", self.folder / OUTPUT / ADAPTER
            await self.threads.run(_make_empty, arriving)
            await link.fetch(ADAPTER, files, arriving)
            await self.threads.run(_replace, arriving, final)
        content = news.lines.encode()
        await self.threads.run(self._append, content)
        self._offset += len(content)

    def _append(self, content: bytes) -> None:
        with (self.folder / PROGRESS_FILE).open("ab") as file:
            file.truncate(self._offset)  # what a full disk has let through of an earlier try
            file.write(content)

    async def _copy_checkpoint(self, link: AgentTrainingLink) -> None:
        step, files = await link.hold(CHECKPOINT)
        if step <= self._step:
            return
        folder = self.folder.parent / FOLDER
        arriving = await self.threads.run(arriving_folder, folder, step)
        await link.fetch(CHECKPOINT, files, arriving)
        await self.threads.run(_keep_checkpoint, arriving, folder, step)
        self._step = step

    # Ending.

    async def cancel(self) -> None:
        """Ask the process to stop after its current step."""
        self._is_to_stop = True
        if self._link is not None:
            with suppress(TrainingAgentLost):  # it is asked when it is connected again
                await self._link.cancel()

    async def end(self) -> None:
        """Let the lease lapse, and have the process killed at once if its agent can be reached."""
        self._is_ended = True
        if self.attempt.checkpoints is not None:
            self.attempt.checkpoints.stop()
        if self._following is not None:
            self._following.cancel()
        if self._link is not None:
            with suppress(TrainingAgentLost):
                await self._link.stop()
                self._note_end()
            await self._link.aclose()
            self._link = None
        await self._agents.end(self._agent.name)
        if self._agents.end_with_service or not self._may_start.is_set():
            self._note_end()
        self.attempt.held.close()

    def _note_end(self) -> None:
        if self._code is None:
            self._code = -signal.SIGKILL


class AgentTrainingLauncher:
    """Starts trainings on agents. Obeys `TrainingLauncher`."""

    def __init__(
        self,
        *,
        agents: TrainingAgents,
        size_of: Callable[[str], AgentSize],
        folders: WorkFolders,
        database: Database,
        clock: Callable[[], datetime],
        lease_threads: Threads,
    ) -> None:
        """`agents`: starts the agents. `size_of`: the size of an instance type, by its name.

        `lease_threads`: extend leases, which nothing else may delay.
        """
        self._size_of = size_of
        self._database, self._clock = database, clock
        self._lease_threads = lease_threads
        self._next = NextAgents(agents, folders.threads)
        self._folders = folders
        self._running: list[NodeTraining] = []

    async def start(self, order: TrainingOrder) -> Training:
        """Start an agent and send it the attempt. Raises `OSError`, `TrainingRefused` and `CannotLaunch`."""
        attempt = await self._folders.prepared(order)
        try:
            agent = await self._next.take(order.job["id"])
            if agent is None:
                instance_type = order.job["compute_config"]["instance_type"]
                agent = await self._next.agents.start(self._size_of(instance_type))
        except BaseException:
            attempt.held.close()
            raise
        claim = JobLease.of(order.job)

        async def extend() -> None:
            await self._lease_threads.run(self._extend, claim)

        threads, blobs = self._folders.threads, self._folders.blobs
        training = NodeTraining(attempt, threads, blobs, self._next, agent, extend)
        try:
            await training.begin(order)
        except BaseException as error:
            await training.end()
            if isinstance(error, TrainingAgentLost):
                raise CannotLaunch(f"the agent was lost before it could start: {error}") from error
            raise
        self._running = [*(one for one in self._running if one.is_running), training]
        return training

    def _extend(self, claim: JobLease) -> None:
        with self._database.write_beside(first=True) as connection:
            job_leases.extend(connection, claim, self._clock())

    def earlier(self, job_id: str, attempt: int) -> TrainingProgress:
        """The progress of an attempt as far as it was copied."""
        return self._folders.earlier(job_id, attempt)

    def preload(self, now: datetime) -> None:
        """Do nothing: which node will train is not known before."""

    async def clear(self, job_id: str) -> None:
        """Remove the folder of a job that has ended."""
        self._next.drop(job_id)
        await self._folders.clear(job_id)

    async def stop(self) -> None:
        """Have all processes killed, if their agents answer in time."""
        ending = [asyncio.create_task(one.end()) for one in self._running if one.is_running]
        ending.append(asyncio.create_task(self._next.stop()))
        await asyncio.wait(ending, timeout=STOP_S)


def _note_failure(copying: "asyncio.Task[None]") -> None:
    if not copying.cancelled() and (error := copying.exception()) is not None:
        logger.warning("a checkpoint could not be copied: %s", type(error).__name__)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)


def _replace(arrived: Path, final: Path) -> None:
    shutil.rmtree(final, ignore_errors=True)
    arrived.rename(final)


def _keep_checkpoint(arrived: Path, folder: Path, step: int) -> None:
    """Publish a checkpoint, and keep the previous one as well, as the training process does."""
    put_in_place(arrived, folder, step)
    for old in sorted(folder.glob(f"{STEP}*"), reverse=True)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
