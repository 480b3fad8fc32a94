"""Decides how many replicas each deployment should have: feeds its row, demand and machine into `scaling.py`.

Remembers the decisions; after a restart it continues from the rows. Starts nothing.
"""

from collections.abc import Callable, Collection
from datetime import datetime, timedelta

from tuneship.contract.deployments import DeploymentStatus
from tuneship.host.machine import more_processes, this_machine
from tuneship.replicas.replica_group import ReplicaGroup
from tuneship.service.cluster.leadership import Leadership
from tuneship.service.cluster.shared_demand import SharedDemand
from tuneship.service.deployments.scaling import (
    ReplicaBounds,
    ScalingDecision,
    ScalingSettings,
    Supply,
    next_decision,
)
from tuneship.service.telemetry.in_flight import InFlightGenerations
from tuneship.service.telemetry.log_recorder import LogRecorder
from tuneship.settings import ServiceSettings
from tuneship.store.database.rows import Row
from tuneship.store.records.deployment_logs import LogEntry


def is_asleep(row: Row) -> bool:
    """Whether the deployment has been scaled to 0 replicas, so that the next request wakes it."""
    return (
        bool(row["auto_scaling"])
        and row["min_replicas"] == 0
        and row["current_replicas"] == 0
        and row["status"] == DeploymentStatus.RUNNING
        and row["health"] == "healthy"
    )


class ScalingDecisions:
    """The scaling decisions of all deployments under health checks."""

    def __init__(
        self,
        *,
        settings: ServiceSettings,
        clock: Callable[[], datetime],
        in_flight: InFlightGenerations,
        log: LogRecorder,
        leadership: Leadership,
        shared: SharedDemand | None = None,
    ) -> None:
        """Start without decisions. `shared`: the demand at all members of a cluster; its leader decides for all."""
        self._clock = clock
        self._in_flight = in_flight
        self._log = log
        self._leadership = leadership
        self._shared = shared
        self._decisions: dict[str, ScalingDecision] = {}
        self._most = settings.replica_processes
        self._scaling = ScalingSettings(
            queue=timedelta(seconds=settings.auto_scaling_queue_s),
            idle=timedelta(seconds=settings.auto_scaling_idle_s),
        )

    def replicas(self, row: Row) -> int:
        """The last decision, within the limits that the row sets now."""
        least = row["min_replicas"]
        if not row["auto_scaling"]:
            return max(1, least)
        return min(max(least, self._decision(row).replicas), max(1, row["max_replicas"]))

    def _decision(self, row: Row) -> ScalingDecision:
        """The last decision; after a restart one made from the row."""
        decision = self._decisions.get(row["id"])
        if decision is not None:
            return decision
        least = 0 if is_asleep(row) else max(1, row["min_replicas"])
        known = row["current_replicas"]
        if self._shared is not None:  # what another leader has decided
            known = row["wanted_replicas"] or known
        count = max(least, known) if row["auto_scaling"] else least
        now = self._clock()
        return ScalingDecision(min(count, max(least, row["max_replicas"])), now, now)

    def decide(self, row: Row, group: ReplicaGroup, model: str | None) -> int:
        """Decide the number of replicas; a change is written into the deployment's log."""
        now, before = self._clock(), self._decision(row)
        supply = Supply(group.answering(model), group.waiting, group.slots)
        if self._shared is None:
            demand = self._in_flight.take_demand(row["id"], now)
        elif self._leadership.leads:
            demand = self._shared.demand_of(row["id"])
        else:
            return self._decided_elsewhere(row, before)

        # A deployment that is being created or updated is tried with a replica.
        is_settled = row["status"] == DeploymentStatus.RUNNING
        least = max(row["min_replicas"], 0 if is_settled else 1)
        if row["auto_scaling"]:
            most = min(row["max_replicas"], self._most)
            if group.is_here:  # elsewhere, a replica without room does not start
                fits = len(group.pids) + more_processes(group.pids)
                most = min(most, this_machine().cpus, fits)
            # The machine never lowers the minimum that the client has set.
            bounds = ReplicaBounds(least, max(1, least, most))
        else:
            bounds = ReplicaBounds(max(1, least), max(1, least))

        after = next_decision(before, bounds, supply, demand, self._scaling, now)
        self._decisions[row["id"]] = after
        if after.replicas != before.replicas:
            text = f"replicas wanted: {after.replicas} instead of {before.replicas}: {after.why}"
            self._log.add(LogEntry(row["id"], now, "info", "supervisor", text))
        return after.replicas

    def _decided_elsewhere(self, row: Row, before: ScalingDecision) -> int:
        """The number that the leader has decided on; a time as leader would go on from there."""
        wanted = row["wanted_replicas"]
        if wanted is None:
            return before.replicas
        if wanted != before.replicas:
            now = self._clock()
            self._decisions[row["id"]] = ScalingDecision(wanted, now, now)
        return wanted

    def keep_only(self, deployments: Collection[str]) -> None:
        """Forget all other deployments."""
        self._in_flight.forget_others(deployments)
        self._decisions = {
            name: decision for name, decision in self._decisions.items() if name in deployments
        }
