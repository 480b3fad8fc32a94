"""The leader of a cluster keeps as many agents as are wanted, and the next leader goes on with those that it finds."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from tests.support.cluster.agent_launchers import PlayedLauncher
from tests.support.cluster.agents import AUTHORITY
from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.engines import PlayedEngines
from tests.support.service.in_process import CATALOGUE
from tests.support.waiting import until_async
from tuneship.agents.agent_replicas import AgentReplicas, ReplicaOrders
from tuneship.agents.agent_starter import AgentOptions, AgentStarter, BaseOptions
from tuneship.host.thread_pools import Threads
from tuneship.replicas.local_replicas import process_starter
from tuneship.replicas.replica_groups import ReplicaGroups
from tuneship.replicas.replica_link import NoReplica
from tuneship.service.cluster.agent_keeper import AgentKeeper, AgentKeeperTiming
from tuneship.service.cluster.attached_agents import AttachedAgents
from tuneship.service.context.notifier import Notifier
from tuneship.serving.replica_client import GenerateRequest
from tuneship.store.cluster import agent_records, leader_lease
from tuneship.store.database.database import Database

pytestmark = pytest.mark.postgres

BASE = CATALOGUE.default
REQUEST = GenerateRequest(tokens=(7,), max_tokens=2, adapter=None)


QUICKLY = AgentKeeperTiming(look_every_s=0.02, retry_pause_s=0.02, noticed_after_s=0.02)


@dataclass
class Cell:
    """A database, a launcher, and one member that leads or does not."""

    database: Database
    launcher: PlayedLauncher
    make_starter: Callable[[], AgentStarter]
    orders: ReplicaOrders
    groups: ReplicaGroups
    engines: PlayedEngines
    notifier: Notifier
    # How often members look at the rows without news of them.
    look_every_s: float
    leads: bool = False

    @property
    def group(self) -> AgentReplicas:
        return group_of(self.groups)

    @asynccontextmanager
    async def other_member(self) -> AsyncIterator[AgentReplicas]:
        """The group of a member that does not lead."""
        orders = ReplicaOrders(lambda: False)
        groups = groups_of(self.engines, Path("unused"), self.make_starter, orders)
        async with attaching(self, orders, groups):
            yield group_of(groups)

    def states(self) -> dict[str, str]:
        with self.database.read() as connection:
            return {row["name"]: row["state"] for row in agent_records.of_all(connection)}

    def failures(self) -> int:
        """The number of failed starts that the rows name."""
        with self.database.read() as connection:
            return sum(one.total for one in agent_records.failures(connection))

    def want(self, replicas: int) -> None:
        self.orders.want(BASE.path, replicas)

    async def ready(self, number: int) -> set[str]:
        """Wait until so many agents are ready and no others have a row."""
        await until_async(lambda: [*self.states().values()] == ["ready"] * number)
        return {*self.states()}

    def take_over(self) -> int:
        """Begin the next epoch, as another leader does."""
        with self.database.write_beside() as connection:
            leader_lease.prepare(connection)
            epoch = leader_lease.take(connection, "test", 0.0)
        assert epoch is not None
        return epoch

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[AgentKeeper]:
        """Lead in a new epoch, until the end or until another one leads."""
        epoch = self.take_over()
        fenced = self.database.fenced(lambda one: leader_lease.check_epoch(one, epoch))
        place = CATALOGUE, self.groups
        keeper = AgentKeeper(
            fenced, self.make_starter(), self.orders, place, self.notifier, QUICKLY
        )
        task, self.leads = asyncio.create_task(keeper.run()), True
        try:
            yield keeper
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.leads = False


def groups_of(
    engines: PlayedEngines,
    folder: Path,
    make_starter: Callable[[], AgentStarter],
    orders: ReplicaOrders,
) -> ReplicaGroups:
    shared_group = partial(AgentReplicas, orders=orders, attach=make_starter().connect)
    return ReplicaGroups(process_starter(engines), folder, shared_group=shared_group)


def group_of(groups: ReplicaGroups) -> AgentReplicas:
    group = groups.of(BASE.path)
    assert isinstance(group, AgentReplicas)
    return group


@asynccontextmanager
async def attaching(
    cell: Cell, orders: ReplicaOrders, groups: ReplicaGroups
) -> AsyncIterator[None]:
    """Attach a member to what the rows say."""
    attached = AttachedAgents(
        cell.database,
        (CATALOGUE, groups),
        orders,
        cell.notifier,
        look_every_s=cell.look_every_s,
    )
    task = asyncio.create_task(attached.run())
    try:
        await attached.has_looked.wait()
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await groups.close()


def playing(
    folder: Path, url: str, act: Callable[[Cell], Awaitable[None]], look_every_s: float = 1.0
) -> None:
    engines, database = PlayedEngines([5, 6]), Database(url, is_shared=True)

    async def run() -> None:
        async with AsyncExitStack() as opened:
            launcher = PlayedLauncher(engines, folder, opened)
            options = AgentOptions(False, 0, 1, lambda _: BaseOptions(), 60)

            def make_starter() -> AgentStarter:
                return AgentStarter(launcher, AUTHORITY, "t", options, lambda: datetime.now(UTC))

            orders = ReplicaOrders(lambda: cell.leads)
            groups = groups_of(engines, folder, make_starter, orders)
            notifier = Notifier()
            cell = Cell(
                database, launcher, make_starter, orders, groups, engines, notifier, look_every_s
            )
            async with attaching(cell, orders, groups):
                await act(cell)
            await Threads("test", 1).finish(1)

    try:
        asyncio.run(run())
    finally:
        database.close()


@pytest.fixture
def cell(tmp_path: Path, postgres: Cluster) -> "Play":
    return partial(playing, tmp_path, postgres.new_database())


Play = Callable[..., None]


def test_as_many_as_wanted_are_started_and_the_newest_leave(cell: Play) -> None:
    async def act(cell: Cell) -> None:
        async with cell.leading():
            cell.want(3)
            three = await cell.ready(3)
            assert three == cell.launcher.live
            await until_async(lambda: len(cell.group.live) == 3)
            cell.engines.may_answer.clear()
            asked = [await cell.group.generate(None, REQUEST) for _ in range(3)]
            cell.want(1)
            await until_async(lambda: min(cell.states().values()) == "leaving")
            await until_async(lambda: len(cell.group.live) == 1)
            for agent in cell.launcher.agents.values():
                for _ in range(3):
                    agent.relay.send_heartbeat()
            assert cell.launcher.live == three  # they still have requests
            cell.engines.may_answer.set()
            assert [await one.read_all() for one in asked] == [[5, 6]] * 3

            def others_have_left() -> bool:
                for agent in cell.launcher.agents.values():
                    agent.relay.send_heartbeat()
                return len(cell.states()) == 1

            await until_async(others_have_left)
            assert {*cell.states()} == {next(iter(cell.launcher.agents))} == cell.launcher.live

    cell(act)


def test_the_next_leader_goes_on_with_the_agents_that_answer(cell: Play) -> None:
    async def act(cell: Cell) -> None:
        async with cell.leading():
            cell.want(2)
            two = await cell.ready(2)
            await until_async(lambda: len(cell.group.live) == 2)
        assert cell.launcher.live == two
        lost, kept = sorted(two)
        before = cell.launcher.agents[kept].relay._epoch
        cell.launcher.agents[lost].relay.over.set()
        await until_async(lambda: len(cell.group.live) == 1)
        async with cell.leading():
            await until_async(lambda: lost not in cell.states() and len(cell.states()) == 2)
            after = await cell.ready(2)
            assert kept in after
            assert cell.launcher.live == after
            # What it would end in Ray is not what it has adopted.
            assert kept in cell.launcher.kept[-1]
        assert cell.launcher.agents[kept].relay._epoch > before

    cell(act)


def test_a_leader_that_was_followed_writes_nothing_and_its_agents_obey_the_next_one(
    cell: Play,
) -> None:
    async def act(cell: Cell) -> None:
        async with cell.leading() as former:
            cell.want(1)
            one = await cell.ready(1)
            relay = cell.launcher.agents[min(one)].relay
            before = relay._epoch
            async with cell.leading():
                await until_async(lambda: relay._epoch > before)
                with pytest.raises(leader_lease.LeadershipLost):
                    await former._write(agent_records.remove, min(one))
                link = former._kept[min(one)].link
                assert link is not None
                link._send({"op": "stop"})
                assert await link.generate(REQUEST).read_all() == [5, 6]
                assert cell.states() == {min(one): "ready"}
                assert cell.launcher.live == one

    cell(act)


def test_an_agent_that_was_started_and_never_ready_is_dropped_by_the_next_leader(
    cell: Play,
) -> None:
    async def act(cell: Cell) -> None:
        cell.take_over()
        with cell.database.write() as connection:
            agent_records.add(connection, "t-half", BASE.id, "0" * 64)
        cell.want(1)
        async with cell.leading():
            await until_async(lambda: "t-half" not in cell.states())
            assert len(await cell.ready(1)) == 1

    cell(act)


def test_one_that_is_lost_or_hangs_is_replaced(cell: Play) -> None:
    async def act(cell: Cell) -> None:
        async with cell.leading() as keeper:
            cell.want(1)
            (first,) = await cell.ready(1)
            cell.launcher.agents[first].relay.over.set()
            await until_async(lambda: first not in cell.states())
            (second,) = await cell.ready(1)
            # Reported at each probe, also before the keeper knows that the row is written.
            await until_async(lambda: keeper.replace(second) or second not in cell.states())
            (third,) = await cell.ready(1)
            assert cell.launcher.live == {third}

    cell(act)


def test_a_start_that_fails_is_reported_and_leaves_nothing(cell: Play) -> None:
    async def act(cell: Cell) -> None:
        cell.launcher.fault = "no room"
        async with cell.leading():
            cell.want(1)
            orders = cell.orders
            await until_async(lambda: orders.failures(BASE.path) > 0)
            assert orders.failed[BASE.path].error == "no room"
            messages = [one.message for one in cell.group.take_events()]
            assert {*messages} == {"replica not started: no room"}
            cell.launcher.fault = ""
            await cell.ready(1)
            await until_async(lambda: not orders.why_not(BASE.path))

    cell(act)


def test_all_members_hear_that_a_replica_could_not_be_started(cell: Play) -> None:
    async def act(cell: Cell) -> None:
        cell.launcher.fault = "no room"
        async with cell.leading(), cell.other_member() as other:
            at_leader, elsewhere = (
                asyncio.create_task(group.generate(None, REQUEST)) for group in (cell.group, other)
            )
            for waiting in (at_leader, elsewhere):
                with pytest.raises(NoReplica, match=r"^no room$"):
                    await waiting
            # Until the next start nobody waits.
            for group in (cell.group, other):
                with pytest.raises(NoReplica, match=r"^no replica can be started now: no room$"):
                    await group.generate(None, REQUEST)
            cell.launcher.fault = ""
            await cell.ready(1)
            for group in (cell.group, other):
                await until_async(lambda group=group: group.live)
                assert await (await group.generate(None, REQUEST)).read_all() == [5, 6]

    cell(act, look_every_s=600)  # so all hear of it by news alone


def test_a_member_that_starts_or_leads_later_knows_the_failures_before(cell: Play) -> None:
    async def act(cell: Cell) -> None:
        orders = cell.orders
        cell.launcher.fault = "no room"
        async with cell.leading():
            cell.want(1)
            await until_async(cell.failures)
        known = cell.failures()
        async with cell.other_member() as other:
            heard = other._orders.failed[BASE.path]
            assert (heard.total, heard.in_a_row, heard.error) == (known, known, "no room")
        orders.failed.clear()
        orders.wanted.clear()
        async with cell.leading():
            await until_async(lambda: orders.keeper is not None)
            assert orders.failures(BASE.path) >= known

    cell(act)
