"""The lines about replicas in a deployment's log: only about replicas that serve it.

Deployments of several tenants share the replicas of a base model. Each deployment counts as many as it wants as its
own, and keeps them as long as they live; a replica that was started for another one is not in its log. No line names a
process, whose number would show two tenants that they share it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from tuneship.replicas.replica_group import ReplicaEvent, ReplicaGroup
from tuneship.store.records.deployment_logs import LogEntry

STARTED, ENDED = "replica started", "replica ended"


@dataclass(frozen=True)
class Listener:
    """A deployment whose log gets the lines."""

    deployment_id: str
    # The name of the adapter in the replicas; None for the base model.
    model: str | None
    # The number of replicas that it should have.
    wanted: int


class ReplicaNews:
    """Remembers, by deployment, the numbers of the replicas that serve it."""

    def __init__(self) -> None:
        """Start without replicas."""
        self._own: dict[str, set[int]] = {}

    def keep_only(self, deployment_ids: Collection[str]) -> None:
        """Forget all other deployments."""
        self._own = {name: own for name, own in self._own.items() if name in deployment_ids}

    def entries(
        self, group: ReplicaGroup, listeners: Sequence[Listener], now: datetime
    ) -> list[LogEntry]:
        """The log entries for all events since the last call; each deployment gets those of its own replicas."""
        happenings = group.take_events()
        return [
            LogEntry(listener.deployment_id, now, level, "replica", message)
            for listener in listeners
            for level, message in self._lines(group, listener, happenings)
        ]

    def _lines(
        self, group: ReplicaGroup, listener: Listener, happenings: Sequence[ReplicaEvent]
    ) -> list[tuple[str, str]]:
        own = self._own.setdefault(listener.deployment_id, set())
        serving = group.serving(listener.model)
        lacks = len(own & {*serving}) < listener.wanted
        # A replica that was ended on purpose is logged by the deployment's number of replicas only.
        lines = [
            (event.level, event.message)
            for event in happenings
            if (event.replica in own and not _is_planned_end(event))
            or (event.replica is None and lacks)
        ]
        own -= {
            event.replica for event in happenings if event.is_end and not _is_planned_end(event)
        }
        had = len(own)
        own -= {event.replica for event in happenings if event.is_end}
        kept = [replica for replica in serving if replica in own]
        others = [replica for replica in serving if replica not in own]
        leaving = sorted(own - {*serving})  # they count until another replica has the model
        own.clear()
        own.update([*kept, *others, *leaving][: listener.wanted])
        # A model that moves to another replica, because another deployment was scaled, is not logged.
        more = len(own) - had
        return [*lines, *[("info", STARTED)] * more, *[("info", ENDED)] * -more]


def _is_planned_end(event: ReplicaEvent) -> bool:
    return event.is_end and event.level == "info"
