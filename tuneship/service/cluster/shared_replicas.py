"""Connects one member of a cluster to the replicas that agents run for all members."""

from collections.abc import Callable
from dataclasses import dataclass

from tuneship.service.cluster.agent_keeper import AgentKeeper
from tuneship.service.cluster.attached_agents import AttachedAgents
from tuneship.service.cluster.shared_demand import SharedDemand
from tuneship.store.database.database import Database


@dataclass(frozen=True)
class SharedReplicas:
    """The background loops of one member."""

    demand: SharedDemand
    attached: AttachedAgents
    # Makes the keeper of agents for one time of leading, on the database behind its fence.
    keeper: Callable[[Database], AgentKeeper]
