"""Looks after what runs, once a second: probes replicas, replaces lost ones, brings their number in line, tells health.

`health` says whether a replica of the deployment's model answered the last probe; one that sleeps is healthy, for the
next request wakes it. A deployment whose replicas cannot be started again becomes `failed`. How many there shall be is
said by `replica_plan.py`.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.errors import DeploymentError, ModelNotFound
from tuneship.host.thread_pools import Threads
from tuneship.runtime.replica_protocol import Adapter
from tuneship.runtime.replica_set import ReplicaSet
from tuneship.service.common.background_retries import BackgroundRetries, error_kind
from tuneship.service.context.context import Parts
from tuneship.service.deployments.replica_log import Listener, ReplicaNews
from tuneship.service.deployments.replica_plan import ReplicaPlan, is_asleep
from tuneship.service.models.handlers import ServedModel, served_model
from tuneship.serving.replica_client import ServingError
from tuneship.store import deployment_records, tables
from tuneship.store.database import is_away
from tuneship.store.deployment_logs import LogEntry
from tuneship.store.queries import Row

logger = logging.getLogger(__name__)

# States in which a deployment needs replicas.
LOADED = (DeploymentStatus.CREATING, DeploymentStatus.RUNNING, DeploymentStatus.UPDATING)
LOOKED_AT = (
    "id",
    "client_id",
    "updated_at",
    "model_name",
    "status",
    "health",
    "min_replicas",
    "max_replicas",
    "current_replicas",
    "auto_scaling",
)
EVERY = timedelta(seconds=1)
UNHEALTHY: dict[str, Any] = {"health": "unhealthy", "current_replicas": 0}
ASLEEP: dict[str, Any] = {"health": "healthy", "current_replicas": 0}
# A replica answers between two steps; a long prompt on a slow machine is one step.
PROBE_PATIENCE_S = 10.0
# Starts that may fail in turn before a deployment is failed.
STARTS = 3


@dataclass(frozen=True)
class WatchedDeployment:
    """A deployment to look after; of its row the columns `LOOKED_AT`."""

    row: Row
    served: ServedModel
    wanted: int = 0
    """Replicas, by this round's decision."""

    @property
    def model(self) -> str | None:
        """By the name that the replicas know."""
        return None if self.served.adapter is None else self.served.adapter.name


class HealthChecks:
    """Level-triggered: rows and processes are compared again each time; only plans and troubles are remembered."""

    def __init__(self, parts: Parts, plan: ReplicaPlan) -> None:
        """HealthChecks start after `begin`."""
        self._parts = parts
        self._plan = plan
        self._due: datetime | None = None
        self._round: asyncio.Task[None] | None = None
        self._visits: dict[Path, asyncio.Task[None]] = {}
        self._troubles = BackgroundRetries(parts.clock)
        self._news = ReplicaNews()
        self._models: dict[str, ServedModel] = {}
        self.threads = Threads("deployment rounds", 2)

    def begin(self) -> None:
        """What ran before the restart is loaded: from now on a missing replica is a lost one."""
        self._due = self._parts.clock()

    @property
    def under_way(self) -> list[asyncio.Task[None]]:
        """What runs now."""
        return [*self._visits.values(), *([self._round] if self._round is not None else [])]

    def start_when_due(self) -> None:
        """One round at a time; a tick does not wait for it."""
        now = self._parts.clock()
        is_under_way = self._round is not None and not self._round.done()
        if self._due is None or now < self._due or is_under_way:
            return
        self._due = now + EVERY
        self._round = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Each base model is visited by itself: a replica that hangs holds up no other model's."""
        asked = {path: group.asked for path, group in self._parts.replicas.groups.items()}
        try:
            charges = await self.threads.run(self._charges)
        except Exception:  # a round must not be the last; the next one tries again
            logger.exception("a round failed")
            return
        known = {one.row["id"] for one in charges}
        self._plan.keep_only(known)
        self._news.keep_only(known)
        by_base: dict[Path, list[WatchedDeployment]] = {
            path: [] for path in self._parts.replicas.groups
        }
        for charge in charges:
            by_base.setdefault(charge.served.base.path, []).append(charge)
        for path, group in by_base.items():
            if path not in self._visits:
                task = asyncio.create_task(self._visit_safely(path, group, asked.get(path, 0)))
                self._visits[path] = task
                task.add_done_callback(lambda _, path=path: self._visits.pop(path, None))

    async def _visit_safely(
        self, path: Path, charges: Sequence[WatchedDeployment], asked: int
    ) -> None:
        try:
            await self._visit(path, charges, asked)
        except Exception:  # the next round visits it again
            logger.exception("a visit failed")

    def _charges(self) -> list[WatchedDeployment]:
        table = tables.deployments
        columns = [table.c[name] for name in LOOKED_AT]
        query = sa.select(*columns).where(table.c.status.in_(LOADED))
        with self._parts.database.read() as connection:
            live = [dict(row) for row in connection.execute(query).mappings()]
            for row in live:
                if row["id"] not in self._models and not self._troubles.is_waiting(row["id"]):
                    self._find_model(connection, row)
        known = {row["id"] for row in live}
        self._models = {name: one for name, one in self._models.items() if name in known}
        self._troubles.keep_only(known)
        return [
            WatchedDeployment(row, self._models[row["id"]])
            for row in live
            if row["id"] in self._models
        ]

    def _find_model(self, connection: sa.Connection, row: Row) -> None:
        """One that is not there is the keeper's to tell, when it settles the row. One must not stop the others."""
        try:
            self._models[row["id"]] = served_model(
                connection, self._parts, row["client_id"], row["model_name"]
            )
            self._troubles.end(row["id"])  # failed starts are counted by themselves
        except Exception as error:
            if is_away(error):
                raise
            is_foreseen = isinstance(error, (ModelNotFound, DeploymentError))
            text = "a deployment's model cannot be had: %s"
            logger.warning(text, row["id"], exc_info=None if is_foreseen else error)
            self._troubles.add(row["id"], error)

    async def _visit(self, path: Path, charges: Sequence[WatchedDeployment], asked: int) -> None:
        """One base model's replicas and the deployments that they serve; `asked`: when the rows were read."""
        group = self._parts.replicas.of(path)
        await group.probe(PROBE_PATIENCE_S)
        if group.asked != asked:  # a deployment came since: its replicas are not to be ended
            return
        charges = [
            replace(one, wanted=self._plan.decide(one.row, group, one.model)) for one in charges
        ]
        group.resize(self._wanted(path, charges), _widths(charges))
        self._log(group, charges)
        running = [one for one in charges if one.row["status"] == DeploymentStatus.RUNNING]
        awake = [one for one in running if one.wanted and not is_asleep(one.row)]
        lost = [one for one in awake if not group.answering(one.model)]
        changed = await self._changed([(one, UNHEALTHY) for one in lost])
        running = [one for one in running if one not in lost] + changed
        await self._changed(await self._states(group, running))
        await _unload_unwanted(group, charges)
        self._log(group, charges)

    def _wanted(self, path: Path, charges: Iterable[WatchedDeployment]) -> int:
        """As many as the most demanding deployment; the default model stays loaded for the next one."""
        settings, default = self._parts.settings, self._parts.catalogue.default
        spare = 1 if settings.preload_base_models and path == default.path else 0
        return max((one.wanted for one in charges), default=0) or spare

    async def _states(
        self, group: ReplicaSet, running: Sequence[WatchedDeployment]
    ) -> list[tuple[WatchedDeployment, dict[str, Any]]]:
        """What their rows have to say; starts what is missing, one try a round for all of them."""
        asleep = [one for one in running if not one.wanted]
        awake = [one for one in running if one.wanted]
        due = [one for one in awake if not self._troubles.is_waiting(one.row["id"])]
        found: list[tuple[WatchedDeployment, dict[str, Any]]] = [(one, ASLEEP) for one in asleep]
        fault = await _fault(group, None) if due else None
        for charge in due:
            own = fault or await _fault(group, charge.served.adapter)
            if own is not None:
                found.append((charge, self._failed_to_start(charge, own)))
                continue
            self._troubles.end(charge.row["id"])
            count = min(charge.wanted, group.answering(charge.model))
            health = "healthy" if count else "unhealthy"
            found.append((charge, {"health": health, "current_replicas": count}))
        return found

    def _failed_to_start(self, charge: WatchedDeployment, error: Exception) -> dict[str, Any]:
        now, identifier = self._parts.clock(), charge.row["id"]
        failures, why = self._troubles.add(identifier, error), _why_not_started(error)
        text = f"start {failures} of {STARTS} failed: {why}"
        self._parts.deployment_log.add(LogEntry(identifier, now, "error", "replica", text))
        if failures < STARTS:
            return UNHEALTHY
        message = f"the replicas ended and could not be started again: {why}"
        failure = {"code": "deployment_error", "message": message}
        return {**UNHEALTHY, "status": DeploymentStatus.FAILED, "error": failure}

    async def _changed(
        self, found: Sequence[tuple[WatchedDeployment, dict[str, Any]]]
    ) -> list[WatchedDeployment]:
        """Write what differs; answers the charges whose rows nobody else has changed."""

        def write() -> list[WatchedDeployment]:
            kept: list[WatchedDeployment] = []
            with self._parts.database.write() as connection:
                for charge, changes in found:
                    now = self._parts.clock()
                    row = {**charge.row, **changes, "updated_at": now}
                    if not _differs(charge.row, changes):
                        kept.append(charge)
                    elif deployment_records.change_if_same(connection, charge.row, now, **changes):
                        kept.append(replace(charge, row=row))
            return kept

        if not any(_differs(charge.row, changes) for charge, changes in found):
            return [charge for charge, _ in found]
        return await self.threads.run(write)

    def _log(self, group: ReplicaSet, charges: Sequence[WatchedDeployment]) -> None:
        listeners = [Listener(one.row["id"], one.model, one.wanted) for one in charges]
        news = self._news.entries(group, listeners, self._parts.clock())
        if news:
            self._parts.deployment_log.add(*news)


def _widths(charges: Iterable[WatchedDeployment]) -> dict[str | None, int]:
    """On how many replicas each model is asked: as many as its most demanding deployment may have."""
    widths: dict[str | None, int] = {}
    for one in charges:
        widths[one.model] = max(one.wanted, widths.get(one.model, 0))
    return widths


async def _unload_unwanted(group: ReplicaSet, charges: Sequence[WatchedDeployment]) -> None:
    """The adapters of those that sleep, while the replicas stay for others."""
    wanted = {one.model for one in charges if one.wanted}
    for model in {one.model for one in charges} - wanted - {None}:
        await group.forget(str(model))


async def _fault(group: ReplicaSet, adapter: Adapter | None) -> Exception | None:
    """Why the replicas cannot be made ready, if so."""
    try:
        await group.ready(adapter)
    except (ServingError, OSError) as error:
        return error
    except Exception as error:  # one deployment must not stop the others
        logger.exception("replicas could not be made ready")
        return error
    return None


def _why_not_started(error: Exception) -> str:
    if isinstance(error, OSError):
        return "a stored file cannot be read"
    if isinstance(error, ServingError):
        return str(error)
    return f"an internal error ({error_kind(error)}), of which the operator finds more in the service's log"


def _differs(row: Row, changes: dict[str, Any]) -> bool:
    return any(name not in row or row[name] != value for name, value in changes.items())
