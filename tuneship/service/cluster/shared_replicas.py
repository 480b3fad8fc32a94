"""The parts by which a member of a cluster shares replicas with the others, where agents run them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tuneship.agents.agent_link import AgentLink, open_agent
from tuneship.agents.agent_protocol import AgentAddress
from tuneship.agents.agent_starter import AgentStarter
from tuneship.agents.attached_replicas import AttachedReplicas
from tuneship.agents.replica_orders import ReplicaOrders
from tuneship.service.cluster.agent_keeper import AgentKeeper
from tuneship.service.cluster.attached_agents import AttachedAgents
from tuneship.service.cluster.shared_demand import SharedDemand
from tuneship.service.context.context import Parts
from tuneship.store.database.database import Database


class SharedGroups:
    """Makes the groups of replicas that this member attaches to."""

    def __init__(self, make_starter: Callable[[], AgentStarter], leads: Callable[[], bool]) -> None:
        """`make_starter`: for one time of leading; `leads`: whether this member leads now."""
        self.make_starter = make_starter
        self.orders = ReplicaOrders(leads)
        self._starter = make_starter()

    def __call__(self, base: Path) -> AttachedReplicas:
        """Make the group of a base model."""
        return AttachedReplicas(base, self.orders, self._attach)

    async def _attach(self, address: AgentAddress) -> AgentLink:
        return await open_agent(address, self._starter.access(), None)


@dataclass(frozen=True)
class SharedReplicas:
    """The parts of one member."""

    orders: ReplicaOrders
    demand: SharedDemand
    attached: AttachedAgents
    keeper: Callable[[Database], AgentKeeper]
    """Makes the keeper of agents for one time of leading, on the database behind its fence."""


def shared_replicas(parts: Parts, groups: SharedGroups, member: str) -> SharedReplicas:
    """Make the parts of the member with this name."""
    demand = SharedDemand(parts.database, parts.in_flight, parts.notifier, member, parts.clock)
    groups.orders.on_need = demand.need
    place = parts.catalogue, parts.replicas

    def keeper(database: Database) -> AgentKeeper:
        return AgentKeeper(database, groups.make_starter(), groups.orders, place, parts.notifier)

    attached = AttachedAgents(parts.database, place, groups.orders, parts.notifier)
    return SharedReplicas(groups.orders, demand, attached, keeper)
