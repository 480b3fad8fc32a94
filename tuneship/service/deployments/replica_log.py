"""What a deployment's log says of replicas: of those that serve it, and of no others.

Deployments of several tenants share the replicas of a base model. A deployment counts as its own as many as it shall
have, and keeps them as long as they live; one that was started for somebody else is no news for it. No line names a
process: its number would tell two tenants that they share one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from tuneship.runtime.replica_protocol import ReplicaEvent, ReplicaGroup
from tuneship.store.deployment_logs import LogEntry

STARTED, ENDED = "replica started", "replica ended"


@dataclass(frozen=True)
class Listener:
    """A deployment whose log is to be written."""

    deployment_id: str
    model: str | None
    """By the name that the replicas know."""
    wanted: int
    """Replicas that it shall have."""


class ReplicaNews:
    """Remembers, by deployment, the numbers of the replicas that serve it."""

    def __init__(self) -> None:
        """No deployment has one."""
        self._own: dict[str, set[int]] = {}

    def keep_only(self, deployment_ids: Collection[str]) -> None:
        """Forget the others."""
        self._own = {name: own for name, own in self._own.items() if name in deployment_ids}

    def entries(
        self, group: ReplicaGroup, listeners: Sequence[Listener], now: datetime
    ) -> list[LogEntry]:
        """What has happened since the last call, for each deployment what concerns it."""
        happenings = group.take_events()
        found: list[LogEntry] = []
        for one in listeners:
            for level, message in self._news(group, one, happenings):
                found.append(LogEntry(one.deployment_id, now, level, "replica", message))
        return found

    def _news(
        self, group: ReplicaGroup, listener: Listener, happenings: Sequence[ReplicaEvent]
    ) -> list[tuple[str, str]]:
        own = self._own.setdefault(listener.deployment_id, set())
        serving = group.serving(listener.model)
        lacks = len(own & {*serving}) < listener.wanted
        told = [
            (one.level, one.message)
            for one in happenings
            if (one.replica in own and not _is_orderly(one)) or (one.replica is None and lacks)
        ]
        own -= {one.replica for one in happenings if one.is_end and not _is_orderly(one)}
        had = len(own)
        own -= {one.replica for one in happenings if one.is_end}
        here = [one for one in serving if one in own]
        others = [one for one in serving if one not in own]
        leaving = sorted(own - {*serving})  # until another one has the model, they count
        own.clear()
        own.update([*here, *others, *leaving][: listener.wanted])
        # A model that moves to another replica, because somebody else has scaled, is no news.
        more = len(own) - had
        return [*told, *[("info", STARTED)] * more, *[("info", ENDED)] * -more]


def _is_orderly(happening: ReplicaEvent) -> bool:
    """Whether a replica was ended on purpose; a deployment learns of that by its own number of replicas."""
    return happening.is_end and happening.level == "info"
