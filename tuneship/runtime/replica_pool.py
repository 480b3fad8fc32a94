"""The replica groups of all base models, made when a model is first needed. Each group: `replica_set.py`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tuneship.runtime.replica_protocol import OpenReplica, ReplicaGroup
from tuneship.runtime.replica_set import ReplicaSet, no_limit, replica_process, usual_weights
from tuneship.runtime.worker_protocol import Runtime


class ReplicaPool:
    """The replicas of all base models."""

    def __init__(
        self,
        runtime: Runtime,
        logs: Path,
        others: Mapping[Path, OpenReplica] | None = None,
        cache_bytes: Callable[[Path], int] = no_limit,
        adapters: Path | None = None,
        weights: Callable[[Path], str | None] = usual_weights,
    ) -> None:
        """`logs`: folder for the processes' output. `others`: openers for base models of other engines.

        `cache_bytes`: size limit of the KV cache of one replica. `adapters`, `weights`: see `replica_process`.
        """
        self._open = replica_process(runtime, cache_bytes, adapters, weights=weights)
        self._others = others or {}
        self._logs = logs
        self._groups: dict[Path, ReplicaGroup] = {}

    @property
    def groups(self) -> Mapping[Path, ReplicaGroup]:
        """The groups that exist so far, by base model directory."""
        return self._groups

    def of(self, base: Path) -> ReplicaGroup:
        """Return the replicas of one base model directory."""
        if base not in self._groups:
            log = self._logs / f"replica-{base.name}.log"
            self._groups[base] = ReplicaSet(self._others.get(base, self._open), base, log)
        return self._groups[base]

    async def close(self) -> None:
        """End every replica."""
        for group in self._groups.values():
            await group.close()
