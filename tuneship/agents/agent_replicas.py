"""The replicas of one base model on a cluster's agents: the leader starts them, and this member attaches to them.

`follow` lists them; the group connects to each as one of several services. It passes on how many there are to be, and
only the leader's word counts (`ReplicaOrders`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tuneship.agents.agent_link import AgentLink
from tuneship.agents.agent_protocol import AgentAddress
from tuneship.host.waiting import wait_for_event
from tuneship.replicas.failed_starts import FailedStarts
from tuneship.replicas.replica import Replica
from tuneship.replicas.replica_group import ReplicaGroup
from tuneship.replicas.replica_link import Adapter, NoReplica, NotStartedYet
from tuneship.serving.replica_client import ReplicaLost, ReplicaRefused, ServingError

logger = logging.getLogger(__name__)

LOOK_S = 0.5

Attach = Callable[[AgentAddress], Awaitable[AgentLink]]


class ReplicaKeeper(Protocol):
    """The keeper of the present time of leading."""

    async def unload(self, replica: str, adapter: str) -> None:
        """Unload an adapter from a replica. Raises `ServingError`."""
        ...

    def replace(self, replica: str) -> None:
        """End a replica that hangs; another one is started."""
        ...


class ReplicaOrders:
    """The wanted numbers of replicas, which outlast a time of leading, and how their starts go."""

    def __init__(self, leads: Callable[[], bool]) -> None:
        """`leads`: whether this process decides now."""
        self._leads = leads
        # Number of replicas by base model.
        self.wanted: dict[Path, int] = {}
        self.failed: dict[Path, FailedStarts] = {}
        # Set while this process leads.
        self.keeper: ReplicaKeeper | None = None
        # Wakes the keeper.
        self.changed = asyncio.Event()
        # Called when a request waits for a replica.
        self.on_need: Callable[[], None] = lambda: None

    @property
    def leads(self) -> bool:
        """Whether this process decides now on the number of replicas."""
        return self._leads()

    def want(self, base: Path, replicas: int) -> None:
        """Set the number of replicas of a base model."""
        if self.wanted.get(base) != replicas:
            self.wanted[base] = replicas
            self.changed.set()

    def want_at_least(self, base: Path, replicas: int) -> None:
        """Raise the number of replicas of a base model."""
        self.want(base, max(replicas, self.wanted.get(base, 0)))

    def failures(self, base: Path) -> int:
        """How many starts have failed in all."""
        return self._failed_of(base).total

    def why_not(self, base: Path) -> str:
        """Why no replica of a base model is started now; empty where one may be."""
        return self._failed_of(base).why_not

    def note_failure(self, base: Path, error: str) -> FailedStarts:
        """Note that a start has failed: the next one is tried after a pause, longer each time. Returns how they go."""
        failed = self.failed[base] = self._failed_of(base).with_failure(error)
        return failed

    def note_success(self, base: Path) -> None:
        """Note that a start has succeeded."""
        self.failed[base] = self._failed_of(base).with_success()

    def _failed_of(self, base: Path) -> FailedStarts:
        return self.failed.get(base, FailedStarts())


@dataclass(frozen=True)
class ReadyAgent:
    """An agent whose replica is ready for all members."""

    name: str
    # Of its replica.
    number: int
    address: AgentAddress


class AgentReplica(Replica):
    """A replica that other services use, too, and that another process may lead."""

    def __init__(self, name: str, link: AgentLink, number: int) -> None:
        """`name`: the agent's; `number`: the replica's, the same in all services. Closing the link does not end the
        agent.
        """
        super().__init__(link.worker, link, number)
        self.name = name
        self._link = link

    @property
    def busy(self) -> int:
        """Requests in flight at the replica; those of other services as of its last heartbeat."""
        return self._link.in_flight + self._link.others

    async def unload(self, adapter: str) -> None:
        """Send no more requests for an adapter; only the leader unloads it."""
        self.adapters.discard(adapter)


class AgentReplicas(ReplicaGroup):
    """Replicas on agents that all members of a cluster share, as one member sees them."""

    is_own = False

    def __init__(
        self, base: Path, orders: ReplicaOrders, attach: Attach, *, look_every_s: float = LOOK_S
    ) -> None:
        """Begin without replicas. `attach`: connects to an agent; raises `ServingError`.

        `look_every_s`: how often a caller that waits for replicas looks whether there are enough.
        """
        super().__init__(is_here=False)
        self._base = base
        self._orders = orders
        self._attach = attach
        self._look_every_s = look_every_s
        self._attaching: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    # Attaching.

    def follow(self, listed: Collection[ReadyAgent]) -> None:
        """Attach to the listed replicas as soon as they answer, and drain all others.

        Called again when the leader has news, also that it could not start one.
        """
        names = {one.name for one in listed}
        self._remove_dead()
        for replica in self._attached():
            if replica.name not in names:
                self._retire(replica)
        for name in self._attaching.keys() - names:
            self._attaching[name].cancel()
        known = {replica.name for replica in self._attached()} | self._attaching.keys()
        for one in listed:
            if one.name not in known:
                task = self._spawn(self._attach_to(one))
                self._attaching[one.name] = task
                task.add_done_callback(lambda _, name=one.name: self._attaching.pop(name, None))
                task.add_done_callback(lambda _: self._changed.set())
        self._changed.set()  # a start may have failed

    def _attached(self) -> list[AgentReplica]:
        return [replica for replica in self._replicas if isinstance(replica, AgentReplica)]

    async def _attach_to(self, listed: ReadyAgent) -> None:
        try:
            link = await self._attach(listed.address)
        except ServingError as error:  # the next look tries again, if it is still listed
            logger.warning("the agent %s does not serve this member: %s", listed.name, error)
            return
        replica = AgentReplica(listed.name, link, listed.number)
        link.on_unloaded = self._forget
        try:
            await self._load_placed(replica)
        except ReplicaLost as error:
            logger.warning("the agent %s was lost: %s", listed.name, error)
            await replica.end()
            return
        except BaseException:
            await replica.end()
            raise
        self._replicas.append(replica)
        self._replicas.sort(key=lambda one: one.number)
        self._emit("info", "replica started", replica)
        self._spawn(self._watch(replica))

    def _forget(self, adapter: str) -> None:
        """Mark an adapter as unloaded by the leader, so that the next request for it loads it again."""
        for replica in self.live:
            replica.adapters.discard(adapter)

    async def first_attached(self) -> None:
        """Wait until it is known of each replica that is listed now whether it answers."""
        if self._attaching:
            await asyncio.wait(self._attaching.values())

    # What the leader decides.

    def report_failure(self, error: str) -> None:
        """Note for the deployments' logs that a replica could not be started."""
        self._emit("error", f"replica not started: {error}")
        self._changed.set()

    def resize(self, wanted: int, widths: Mapping[str | None, int]) -> None:
        """Set the number of replicas that serve each model; the total number is decided by the leader."""
        self._widths = dict(widths)
        self._orders.want(self._base, wanted)
        self._remove_dead()

    async def ready(self, adapter: Adapter | None, width: int = 1) -> None:
        """Load and check the adapter. Raises `ServingError` if no replica can serve it.

        Only the leader waits for replicas; elsewhere `NotStartedYet` is raised where there are none.
        """
        if not self.live and not self._orders.leads:
            raise NotStartedYet("the leader has not started a replica yet")
        await super().ready(adapter, width)

    @property
    def _why_no_start(self) -> str:
        return self._orders.why_not(self._base)

    async def _ensure_live(self, width: int) -> None:
        """Wait for `width` replicas at the leader, and for one elsewhere. Raises `NoReplica` after a failed start."""
        orders, base = self._orders, self._base
        failed, has_asked = orders.failures(base), False
        while True:
            # The number that is wanted may change meanwhile.
            least = max(1, min(width, orders.wanted.get(base, width))) if orders.leads else 1
            if len(self.live) >= least:
                return
            if orders.leads:
                orders.want_at_least(base, width)
            if not has_asked:
                orders.on_need()
                has_asked = True
            if orders.failures(base) > failed:
                if self.live:
                    return
                raise NoReplica(orders.failed[base].error)
            self._changed.clear()
            await wait_for_event(self._changed, self._look_every_s)

    async def _end_hung(self, replica: Replica) -> None:
        """Have a replica that does not answer replaced, where this process leads."""
        keeper = self._orders.keeper
        if keeper is not None and isinstance(replica, AgentReplica):
            keeper.replace(replica.name)

    async def unload(self, adapter: str) -> None:
        """Unload an adapter if this process leads, otherwise only forget it. An adapter in use stays loaded."""
        keeper = self._orders.keeper if self._orders.leads else None
        having = [replica for replica in self._attached() if replica.has(adapter)]
        await super().unload(adapter)
        if keeper is None:
            return
        for replica in having:
            try:
                await keeper.unload(replica.name, adapter)
            except ReplicaRefused:
                replica.adapters.add(adapter)
            except ReplicaLost:
                continue
