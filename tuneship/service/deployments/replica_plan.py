"""How many replicas each deployment shall have now: its row, its requests and this machine, put before
`common/scaling.py`.

Remembers what was decided; after a restart the rows say where it stood. Starts nothing.
"""

from collections.abc import Collection, Mapping
from datetime import timedelta

from tuneship.contract.deployments import DeploymentStatus
from tuneship.host.machine import more_processes, this_machine
from tuneship.runtime.replica_set import ReplicaSet
from tuneship.service.common.scaling import (
    Bounds,
    ScalingDecision,
    ScalingSettings,
    Supply,
    next_decision,
)
from tuneship.service.context.context import Parts
from tuneship.store.deployment_logs import LogEntry
from tuneship.store.queries import Row


def is_asleep(row: Row) -> bool:
    """Whether no replica is what the deployment is meant to have: the next request wakes it."""
    return (
        bool(row["auto_scaling"])
        and row["min_replicas"] == 0
        and row["current_replicas"] == 0
        and row["status"] == DeploymentStatus.RUNNING
        and row["health"] == "healthy"
    )


class ReplicaPlan:
    """The paces of all deployments that are looked after."""

    def __init__(self, parts: Parts) -> None:
        """Nothing was decided yet."""
        self._parts = parts
        self._paces: dict[str, ScalingDecision] = {}
        settings = parts.settings
        self._patience = ScalingSettings(
            queue=timedelta(seconds=settings.auto_scaling_queue_s),
            idle=timedelta(seconds=settings.auto_scaling_idle_s),
        )

    def replicas(self, row: Row) -> int:
        """As last decided; what its row asks for at least counts from the first moment."""
        least = row["min_replicas"]
        if not row["auto_scaling"]:
            return max(1, least)
        return min(max(least, self._pace(row).replicas), max(1, row["max_replicas"]))

    def _pace(self, row: Row) -> ScalingDecision:
        found = self._paces.get(row["id"])
        if found is not None:
            return found
        least = 0 if is_asleep(row) else max(1, row["min_replicas"])
        count = max(least, row["current_replicas"]) if row["auto_scaling"] else least
        now = self._parts.clock()
        return ScalingDecision(min(count, max(least, row["max_replicas"])), now, now)

    def decide(self, row: Row, group: ReplicaSet, model: str | None) -> int:
        """The number from now on; a change is told in the deployment's log."""
        now, before = self._parts.clock(), self._pace(row)
        supply = Supply(group.answering(model), group.waiting, group.rows)
        demand = self._parts.in_flight.take_demand(row["id"], now)
        bounds = self._bounds(row, group)
        after = next_decision(before, bounds, supply, demand, self._patience, now)
        self._paces[row["id"]] = after
        if after.replicas != before.replicas:
            text = f"replicas wanted: {after.replicas} instead of {before.replicas}: {after.why}"
            self._parts.deployment_log.add(LogEntry(row["id"], now, "info", "supervisor", text))
        return after.replicas

    def _bounds(self, row: Row, group: ReplicaSet) -> Bounds:
        """Without auto-scaling there is one number. What a client sets as the least is not the machine's to lower."""
        is_settled = row["status"] == DeploymentStatus.RUNNING
        least = max(row["min_replicas"], 0 if is_settled else 1)  # what changes is tried awake
        if not row["auto_scaling"]:
            return Bounds(max(1, least), max(1, least))
        here = min(this_machine().cpus, len(group.pids) + more_processes(group.pids))
        most = min(row["max_replicas"], self._parts.settings.replica_processes, here)
        return Bounds(least, max(1, least, most))

    def keep_only(self, deployments: Collection[str]) -> None:
        """Forget the others."""
        self._parts.in_flight.forget_others(deployments)
        kept: Mapping[str, ScalingDecision] = self._paces
        self._paces = {name: pace for name, pace in kept.items() if name in deployments}
