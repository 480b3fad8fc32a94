"""The replica groups of all base models, made when a model is first needed. Each group: `replica_group.py`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tuneship.replicas.local_replicas import LocalReplicas
from tuneship.replicas.replica import StartReplica
from tuneship.replicas.replica_group import ReplicaGroup


class ReplicaGroups:
    """The replicas of all base models."""

    def __init__(
        self,
        own: StartReplica,
        logs: Path,
        others: Mapping[Path, StartReplica] | None = None,
        *,
        is_own_here: bool = True,
        shared_group: Callable[[Path], ReplicaGroup] | None = None,
    ) -> None:
        """`own`: starts replicas of the built-in engine. `others`: start replicas for other engines, by base model.

        `logs`: folder for the processes' output. `is_own_here`: whether `own` makes processes of this machine.
        `shared_group`: makes the built-in engine's groups where a cluster shares its replicas; `own` is not used then.
        """
        self._own = own
        self._is_own_here = is_own_here
        self._others = others or {}
        self._logs = logs
        self._shared_group = shared_group
        self._groups: dict[Path, ReplicaGroup] = {}

    @property
    def groups(self) -> Mapping[Path, ReplicaGroup]:
        """The groups that exist so far, by base model directory."""
        return self._groups

    def of(self, base: Path) -> ReplicaGroup:
        """Return the replicas of one base model directory."""
        if base not in self._groups:
            log = self._logs / f"replica-{base.name}.log"
            other = self._others.get(base)
            if other is None and self._shared_group is not None:
                self._groups[base] = self._shared_group(base)
                return self._groups[base]
            is_here = self._is_own_here or other is not None
            self._groups[base] = LocalReplicas(other or self._own, base, log, is_here=is_here)
        return self._groups[base]

    async def close(self) -> None:
        """End every replica."""
        for group in self._groups.values():
            await group.close()
