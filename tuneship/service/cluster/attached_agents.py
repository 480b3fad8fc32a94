"""Attaches this member of a cluster to the replicas that its leader has started, by the rows of their agents.

Where the leader could not start one, this member hears of it in the same way.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from tuneship.agents.agent_protocol import AgentAddress
from tuneship.agents.agent_replicas import AgentReplicas, ReadyAgent, ReplicaOrders
from tuneship.host.thread_pools import Threads
from tuneship.host.waiting import wait_for_event
from tuneship.replicas.failed_starts import FailedStarts
from tuneship.replicas.replica_groups import ReplicaGroups
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.context.notifier import Notifier
from tuneship.store.cluster import agent_records
from tuneship.store.cluster.agent_records import AgentStanding, ReportedFailures
from tuneship.store.database.database import Database
from tuneship.store.database.tables import AgentRow

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
TOPIC = "agents"


class AttachedAgents:
    """Keeps the groups of replicas equal to the rows."""

    def __init__(
        self,
        database: Database,
        place: tuple[Catalogue, ReplicaGroups],
        orders: ReplicaOrders,
        notifier: Notifier,
        *,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        """Begin with nothing attached. `place`: the base models and the groups; `orders` hear of failed starts.

        `look_every_s`: how often it looks at the rows without news of them.
        """
        self._database = database
        self._catalogue, self._replicas = place
        self._orders = orders
        self._notifier = notifier
        self._look_every_s = look_every_s
        self._threads = Threads("agents", 1)
        # Set when it is known of all replicas that were there at the start whether they answer.
        self.has_looked = asyncio.Event()

    async def run(self) -> None:
        """Look at the rows at every news and at every interval, until cancelled."""
        with self._notifier.listening(TOPIC) as news:
            while True:
                news.clear()
                try:
                    await self._look()
                except SQLAlchemyError as error:  # the database is away: what is attached stays
                    logger.warning("the agents could not be looked up: %s", type(error).__name__)
                except Exception:  # the loop must outlive any failure
                    logger.exception("the agents could not be looked up")
                await wait_for_event(news, self._look_every_s)

    async def _look(self) -> None:
        listed: dict[Path, list[ReadyAgent]] = defaultdict(list)
        rows, failures = await self._threads.run(self._rows)
        if not self._orders.leads:  # the leader knows better
            self._orders.failed.update(heard(failures, self._catalogue))
        for row in rows:
            base, replica = self._catalogue.get(row["base"]), ready_agent(row)
            if base is not None and replica is not None:
                listed[base.path].append(replica)
                self._replicas.of(base.path)
        groups = self._replicas.groups.items()
        shared = {base: one for base, one in groups if isinstance(one, AgentReplicas)}
        for base, group in shared.items():
            group.follow(listed[base])
        if not self.has_looked.is_set():
            for group in shared.values():
                await group.first_attached()
            self.has_looked.set()

    def _rows(self) -> tuple[list[AgentRow], list[ReportedFailures]]:
        with self._database.read() as connection:
            return agent_records.of_all(connection), agent_records.failures(connection)


def heard(failures: Iterable[ReportedFailures], catalogue: Catalogue) -> dict[Path, FailedStarts]:
    """The failed starts of the base models that this member has."""
    return {
        base.path: FailedStarts.heard(one.total, one.in_a_row, one.error, one.pause_s)
        for one in failures
        if (base := catalogue.get(one.base)) is not None
    }


def ready_agent(row: AgentRow) -> ReadyAgent | None:
    """The replica that a row lets all members use; None while it starts or leaves."""
    address = address_of(row)
    if row["state"] != AgentStanding.READY or address is None:
        return None
    return ReadyAgent(row["name"], row["number"], address)


def address_of(row: AgentRow) -> AgentAddress | None:
    """The place where an agent listens; None while it starts."""
    if row["host"] is None or row["port"] is None or row["certificate"] is None:
        return None
    return AgentAddress(row["host"], row["port"], row["certificate"])
