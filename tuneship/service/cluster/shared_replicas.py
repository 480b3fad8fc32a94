"""The replicas that the members of a cluster share, where agents run them: what one member does with them."""

from collections.abc import Callable

from tuneship.agents.agent_replicas import ReplicaOrders
from tuneship.agents.agent_starter import AgentStarter
from tuneship.service.cluster.agent_keeper import AgentKeeper
from tuneship.service.cluster.attached_agents import AttachedAgents
from tuneship.service.cluster.shared_demand import SharedDemand
from tuneship.service.context.context import Parts
from tuneship.store.database.database import Database


class SharedReplicas:
    """The background loops of one member."""

    def __init__(
        self,
        parts: Parts,
        orders: ReplicaOrders,
        make_starter: Callable[[], AgentStarter],
        member: str,
    ) -> None:
        """`orders`: of the groups in `parts`; `make_starter`: for one time of leading; `member`: this one's name."""
        self._parts = parts
        self._orders = orders
        self._make_starter = make_starter
        self._place = parts.catalogue, parts.replicas
        self.demand = SharedDemand(
            parts.database, parts.in_flight, parts.notifier, member, parts.clock
        )
        self.attached = AttachedAgents(parts.database, self._place, orders, parts.notifier)
        orders.on_need = self.demand.need

    def keeper(self, database: Database) -> AgentKeeper:
        """Make the keeper of agents for one time of leading, on the database behind its fence."""
        starter, notifier = self._make_starter(), self._parts.notifier
        return AgentKeeper(database, starter, self._orders, self._place, notifier)
