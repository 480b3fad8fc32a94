"""Starts and ends the agents that all members of a cluster share, while this process leads, and writes their rows.

A row comes before its agent, so a leader that follows knows of all that may run. It adopts those that answer and that
run what it would order, and starts others for the rest, whose rows it removes: nobody attaches to those any more, and
they end because no service is connected. What this leader orders an agent to do carries the epoch of its lease.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from tuneship.agents.agent_link import AgentLink
from tuneship.agents.agent_protocol import AgentAddress
from tuneship.agents.agent_replicas import AgentReplicas, ReplicaOrders
from tuneship.agents.agent_starter import AgentStarter
from tuneship.agents.launchers import CannotLaunch
from tuneship.host.thread_pools import Threads
from tuneship.host.waiting import wait_for_event
from tuneship.replicas.local_replicas import START_TIMEOUT_S
from tuneship.replicas.replica import Replica
from tuneship.replicas.replica_group import DRAIN_S
from tuneship.replicas.replica_groups import ReplicaGroups
from tuneship.service.background.shutdown import end_tasks
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.cluster.attached_agents import TOPIC, address_of, heard
from tuneship.service.context.notifier import Notifier
from tuneship.serving.replica_client import ReplicaLost, ReplicaRefused, ServingError
from tuneship.store.cluster import agent_records, leader_lease
from tuneship.store.cluster.agent_records import AgentStanding, ReportedFailures
from tuneship.store.cluster.leader_lease import LeadershipLost
from tuneship.store.database.database import Database
from tuneship.store.database.tables import AgentRow

logger = logging.getLogger(__name__)
R = TypeVar("R")

# An agent whose connection broke is tried again so often before it is given up: the network may have failed alone.
TRIES = 2
END_S = 3.0


@dataclass(frozen=True)
class AgentKeeperTiming:
    """The times of the work on agents."""

    look_every_s: float = 1.0
    # The pause before something that failed is tried again.
    retry_pause_s: float = 1.0
    # All members have looked at the rows after this time.
    noticed_after_s: float = 3.0


@dataclass(eq=False)
class KeptAgent:
    """An agent that has a row."""

    name: str
    base: Path
    number: int
    standing: AgentStanding
    # As its leader; None until it is connected.
    link: AgentLink | None = None
    # Its work: being started, or being watched until it is lost.
    task: "asyncio.Task[None] | None" = field(default=None, repr=False)

    @property
    def counts(self) -> bool:
        """Whether it counts towards the wanted number."""
        return self.standing is not AgentStanding.LEAVING


class AgentKeeper:
    """Keeps as many agents as are wanted, for one time of leading. Implements `ReplicaKeeper`."""

    def __init__(
        self,
        database: Database,
        starter: AgentStarter,
        orders: ReplicaOrders,
        place: tuple[Catalogue, ReplicaGroups],
        notifier: Notifier,
        timing: AgentKeeperTiming = AgentKeeperTiming(),
    ) -> None:
        """`database`: fenced. `place`: the base models, and the groups to inform of failed starts."""
        self._database = database
        self._starter = starter
        self._orders = orders
        self._catalogue, self._replicas = place
        self._notifier = notifier
        self._timing = timing
        self._threads = Threads("rows of agents", 2)
        self._kept: dict[str, KeptAgent] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._epoch = 0

    async def run(self) -> None:
        """Work until cancelled, or until this process does not lead any more; the agents go on."""
        try:
            await self._repeat(self._adopt_all, until_done=True)
            self._orders.keeper = self
            await self._repeat(self._step)
        except LeadershipLost:
            logger.info("another process keeps the agents from now on")
        finally:
            if self._orders.keeper is self:
                self._orders.keeper = None
            await end_tasks([*self._tasks], END_S)
            links = [one.link for one in self._kept.values() if one.link is not None]
            await asyncio.gather(*(link.leave() for link in links))

    async def _repeat(
        self, step: Callable[[], Coroutine[Any, Any, None]], *, until_done: bool = False
    ) -> None:
        while True:
            self._orders.changed.clear()
            try:
                await step()
            except LeadershipLost:
                raise
            except Exception:  # the loop must outlive any failure; the next step tries again
                logger.exception("the agents could not be kept")
                await asyncio.sleep(self._timing.retry_pause_s)
            else:
                if until_done:
                    return
                await wait_for_event(self._orders.changed, self._timing.look_every_s)

    # Agents of an earlier leader.

    async def _adopt_all(self) -> None:
        """Take over the agents in the rows that still answer."""
        self._epoch, rows, failures = await self._write(self._read_rows)
        self._orders.failed.update(heard(failures, self._catalogue))
        adopting: list[asyncio.Task[None]] = []
        for row in rows:
            base, address = self._catalogue.get(row["base"]), address_of(row)
            if base is None or address is None:  # it was never ready, so nobody uses it
                await self._drop(row["name"])
                continue
            standing = AgentStanding(row["state"])
            kept = KeptAgent(row["name"], base.path, row["number"], standing)
            self._kept[kept.name] = kept
            task = kept.task = self._spawn(self._adopt(kept, address))
            adopting.append(task)
        if adopting:
            await asyncio.wait(adopting)

    def _read_rows(
        self, connection: sa.Connection
    ) -> tuple[int, list[AgentRow], list[ReportedFailures]]:
        epoch = leader_lease.epoch_of(connection)
        return epoch, agent_records.of_all(connection), agent_records.failures(connection)

    async def _adopt(self, kept: KeptAgent, address: AgentAddress) -> None:
        """Connect to an agent that an earlier leader has started."""
        try:
            await self._connect(kept, address)
        except (ReplicaRefused, OSError) as error:
            logger.warning("the agent %s is replaced: %s", kept.name, error)
            await self._drop(kept.name)  # members finish what they have there, then it is alone
        except ReplicaLost as error:
            logger.warning("the agent %s is given up: %s", kept.name, error)
            await self._drop(kept.name, ends=True)
        else:
            logger.info("the agent %s continues", kept.name)
            if kept.standing is AgentStanding.LEAVING:
                self._spawn(self._leave(kept))
            else:
                kept.task = self._spawn(self._watch(kept, address))

    async def _connect(self, kept: KeptAgent, address: AgentAddress) -> AgentLink:
        """Connect as the leader. Raises `ServingError`, and `OSError` if the base model cannot be read."""
        order = await self._starter.order_for(kept.base)
        end = partial(self._starter.end, kept.name)
        error = ReplicaLost("the agent does not answer")
        for number in range(TRIES):
            await asyncio.sleep(self._timing.retry_pause_s if number else 0)
            try:
                kept.link = await self._starter.connect(address, self._epoch, order, end)
            except ReplicaLost as lost:
                error = lost
            else:
                return kept.link
        raise error

    # The number of agents.

    async def _step(self) -> None:
        """Start missing replicas, and let surplus ones leave."""
        for base, wanted in list(self._orders.wanted.items()):
            mine = [one for one in self._kept.values() if one.base == base and one.counts]
            # Those that are not ready leave first, then the newest.
            mine.sort(key=lambda one: (one.standing is not AgentStanding.READY, one.number))
            for surplus in mine[wanted:]:
                await self._dismiss(surplus)
            if len(mine) < wanted and not self._orders.why_not(base):
                await self._begin_start(base)
                self._orders.changed.set()  # perhaps another one is missing

    async def _dismiss(self, kept: KeptAgent) -> None:
        if kept.standing is AgentStanding.STARTING:
            if kept.task is not None:
                kept.task.cancel()  # which removes its row
            kept.standing = AgentStanding.LEAVING
            return
        await self._write(agent_records.set_leaving, kept.name)
        self._notifier.notify(TOPIC)
        kept.standing = AgentStanding.LEAVING
        self._spawn(self._leave(kept))

    async def _begin_start(self, base: Path) -> None:
        """Write the row of a new agent and start it in the background."""
        identifier = self._id_of(base)
        if identifier is None:  # no longer in the catalogue
            return
        name = self._starter.new_name()
        try:
            order = await self._starter.order_for(base)
        except OSError as error:
            text = f"the replica could not be started: {type(error).__name__}"
            await self._note_failure(base, text)
            return
        number = await self._write(agent_records.add, name, identifier, order.digest)
        kept = self._kept[name] = KeptAgent(name, base, number, AgentStanding.STARTING)
        kept.task = self._spawn(self._start(kept))

    async def _start(self, kept: KeptAgent) -> None:
        """Start an agent, and let all members use it when its replica has made a token."""
        try:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    address = await self._starter.start(kept.name, kept.base, self._kept.keys)
                    link = await self._connect(kept, address)
            except TimeoutError:
                raise ReplicaLost("the replica did not become ready in time") from None
            await Replica(link.worker, link, kept.number).check(None)
            place = address.host, address.port, address.digest
            await self._write(agent_records.set_ready, kept.name, *place)
        except (ServingError, CannotLaunch, OSError) as error:
            await self._give_up(kept)
            await self._note_failure(kept.base, str(error))
            return
        except BaseException:
            await self._give_up(kept)
            raise
        kept.standing = AgentStanding.READY
        self._orders.note_success(kept.base)
        self._notifier.notify(TOPIC)
        kept.task = self._spawn(self._watch(kept, address))

    async def _give_up(self, kept: KeptAgent) -> None:
        """End an agent that has not become ready."""
        link, kept.link = kept.link, None
        if link is not None:
            await link.aclose()
        await self._drop(kept.name, ends=True)

    async def _note_failure(self, base: Path, error: str) -> None:
        """Let all members hear that a replica could not be started."""
        failed = self._orders.note_failure(base, error)
        group = self._replicas.of(base)
        if isinstance(group, AgentReplicas):
            group.report_failure(error)
        identifier = self._id_of(base)
        if identifier is None:  # no longer in the catalogue
            return
        try:
            await self._write(
                agent_records.note_failure, identifier, failed.in_a_row, error, failed.pause_s
            )
        except SQLAlchemyError as fault:  # requests at other members wait for the next start
            logger.warning("a failed start is not in the rows: %s", type(fault).__name__)
        self._notifier.notify(TOPIC)

    def _id_of(self, base: Path) -> str | None:
        return next((one.id for one in self._catalogue if one.path == base), None)

    # One agent.

    async def _watch(self, kept: KeptAgent, address: AgentAddress) -> None:
        """Wait until an agent is lost, even if its connection was made again meanwhile; then forget it."""
        while kept.link is not None:
            lost = await kept.link.wait_lost()
            try:
                await self._connect(kept, address)
            except (ServingError, OSError):
                logger.warning("the agent %s is lost: %s", kept.name, lost)
                break
        await self._drop(kept.name, ends=True)
        self._orders.changed.set()

    async def _leave(self, kept: KeptAgent) -> None:
        """Stop an agent when no member has requests there any more, or after a while."""
        loop, link = asyncio.get_running_loop(), kept.link
        deadline = loop.time() + DRAIN_S
        await asyncio.sleep(self._timing.noticed_after_s)
        # Its heartbeats say how many requests of others it has; the first one may be from before.
        seen = link.heartbeats if link is not None else 0
        while link is not None and not link.is_lost and loop.time() < deadline:
            if link.heartbeats > seen + 1 and not link.others:
                break
            await asyncio.sleep(self._timing.look_every_s)
        if kept.task is not None:
            kept.task.cancel()
        kept.link = None
        if link is not None:
            await link.aclose()
        await self._drop(kept.name)

    async def unload(self, replica: str, adapter: str) -> None:
        """Unload an adapter from a replica. Raises `ServingError`."""
        kept = self._kept.get(replica)
        if kept is not None and kept.link is not None:
            await kept.link.unload(adapter)

    def replace(self, replica: str) -> None:
        """End a hanging replica; the next step starts another one."""
        kept = self._kept.get(replica)
        if kept is not None and kept.standing is AgentStanding.READY:
            kept.standing = AgentStanding.LEAVING
            self._spawn(self._end_hung(kept))

    async def _end_hung(self, kept: KeptAgent) -> None:
        if kept.task is not None:
            kept.task.cancel()
        link, kept.link = kept.link, None
        await self._drop(kept.name)
        if link is not None:
            await link.aclose()
        self._orders.changed.set()

    async def _drop(self, name: str, *, ends: bool = False) -> None:
        """Forget an agent and remove its row. `ends`: also have its launcher end it."""
        self._kept.pop(name, None)
        try:
            await self._write(agent_records.remove, name)
        except (SQLAlchemyError, LeadershipLost) as error:  # the next leader removes it
            logger.warning("the row of an agent stays: %s", type(error).__name__)
        self._notifier.notify(TOPIC)
        if ends:
            await self._starter.end(name)

    # Rows and tasks.

    async def _write(self, work: Callable[..., R], *arguments: Any) -> R:
        """Change rows, if this process still leads. Raises `LeadershipLost` and SQLAlchemy's errors."""

        def write() -> R:
            with self._database.write_beside() as connection:
                return work(connection, *arguments)

        return await self._threads.run(write)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("an agent is not kept any more: %s", type(error).__name__)
