"""Health checks, once a second: probes replicas, replaces lost ones, scales their number and records the health.

`health` says whether a replica of the deployment's model answered the last probe; a deployment that is asleep is
healthy, since the next request wakes it. A deployment whose replicas cannot be started again becomes `failed`. The
number of replicas is decided by `scaling_decisions.py`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.errors import DeploymentError, ModelNotFound
from tuneship.host.thread_pools import Threads
from tuneship.replicas.replica_group import ReplicaGroup
from tuneship.replicas.replica_groups import ReplicaGroups
from tuneship.replicas.replica_link import Adapter, NotStartedYet
from tuneship.service.background.background_retries import BackgroundRetries, error_kind
from tuneship.service.cluster.leadership import Leadership
from tuneship.service.cluster.shared_replicas import SharedReplicas
from tuneship.service.deployments.replica_log import Listener, ReplicaNews
from tuneship.service.deployments.scaling_decisions import ScalingDecisions, is_asleep
from tuneship.service.models.served_models import FoundModel, ModelLookup
from tuneship.service.telemetry.in_flight import InFlightGenerations
from tuneship.service.telemetry.log_recorder import LogRecorder
from tuneship.serving.replica_client import ServingError
from tuneship.store.database.database import Database, is_away
from tuneship.store.database.rows import Row
from tuneship.store.records import deployment_records
from tuneship.store.records.deployment_logs import LogEntry

logger = logging.getLogger(__name__)

# The checks read no more: rows are wide, and all deployments are read each second.
ROW_COLUMNS = (
    "id",
    "client_id",
    "updated_at",
    "model_name",
    "status",
    "health",
    "min_replicas",
    "max_replicas",
    "current_replicas",
    "wanted_replicas",
    "auto_scaling",
)
EVERY = timedelta(seconds=1)
UNHEALTHY: dict[str, Any] = {"health": "unhealthy", "current_replicas": 0}
ASLEEP: dict[str, Any] = {"health": "healthy", "current_replicas": 0}
# A replica answers between two steps; a long prompt on a slow machine is one step.
PROBE_TIMEOUT_S = 10.0
# How long a member that does not lead looks at a deleted deployment, whose last requests it may still answer.
UNLOADED_WITHIN = timedelta(minutes=5)
# Consecutive starts that may fail before the deployment becomes `failed`.
MAX_STARTS = 3


@dataclass(frozen=True)
class WatchedDeployment:
    """A deployment under health checks; its row has the columns `ROW_COLUMNS`."""

    row: Row
    served: FoundModel
    # Replicas that this check has decided on.
    wanted: int = 0

    @property
    def id(self) -> str:
        """The id of the deployment."""
        return self.row["id"]

    @property
    def model(self) -> str | None:
        """The name of the adapter in the replicas; None for the base model."""
        return None if self.served.adapter is None else self.served.adapter.name


RowChange = tuple[WatchedDeployment, dict[str, Any]]


class HealthChecks:
    """Compares rows and processes again at each check, and remembers only plans and failures."""

    def __init__(  # noqa: PLR0913 - all that it uses, by name
        self,
        *,
        database: Database,
        replicas: ReplicaGroups,
        models: ModelLookup,
        in_flight: InFlightGenerations,
        log: LogRecorder,
        clock: Callable[[], datetime],
        plan: ScalingDecisions,
        leadership: Leadership,
        keeps_default: bool,
        shared: SharedReplicas | None = None,
    ) -> None:
        """Start no check before `begin`. `shared`: the replicas of the whole cluster.

        `keeps_default`: the default base model stays loaded when no deployment needs it.
        """
        self._replicas = replicas
        self._lookup = models
        self._in_flight = in_flight
        self._log = log
        self._clock = clock
        self._keeps_default = keeps_default
        self._shared = shared
        self._leadership = leadership
        self._database = database.fenced(leadership.fence)
        self._plan = plan
        self._due: datetime | None = None
        self._reading: asyncio.Task[None] | None = None
        # By base model.
        self._checking: dict[Path, asyncio.Task[None]] = {}
        self._retries = BackgroundRetries(clock)
        self._news = ReplicaNews()
        self._models: dict[str, FoundModel] = {}
        self.threads = Threads("deployment rounds", 2)

    def begin(self) -> None:
        """Start the checks. All deployments of before a restart are loaded by now, so a missing replica is lost."""
        self._due = self._clock()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks in flight."""
        return [*self._checking.values(), *([self._reading] if self._reading is not None else [])]

    def start_when_due(self) -> None:
        """Start a check unless the one before still reads the rows. Returns at once."""
        now = self._clock()
        is_reading = self._reading is not None and not self._reading.done()
        if self._due is None or now < self._due or is_reading:
            return
        self._due = now + EVERY
        self._reading = asyncio.create_task(self._start_checks())

    async def _start_checks(self) -> None:
        requests = {path: group.ready_calls for path, group in self._replicas.groups.items()}
        try:
            watched = await self.threads.run(self.watched)
            if self._shared is not None and self._leadership.leads:
                await self.threads.run(self._shared.demand.read)
            leads = self._leadership.leads  # where it does, deleted ones are unloaded in any case
            deleted = [] if leads else await self.threads.run(self._deleted_lately)
        except Exception:  # the next check tries again
            logger.exception("a health check failed")
            return
        known = {one.id for one in watched}
        self._plan.keep_only(known)
        self._news.keep_only(known)
        by_base: dict[Path, list[WatchedDeployment]] = {path: [] for path in self._replicas.groups}
        for one in watched:
            by_base.setdefault(one.served.base.path, []).append(one)
        # Each base model has a task of its own: a replica that hangs delays no other model's check.
        for path, deployments in by_base.items():
            if path not in self._checking:
                check = self._check(path, deployments, deleted, requests.get(path, 0))
                self._checking[path] = task = asyncio.create_task(check)
                task.add_done_callback(lambda _, path=path: self._checking.pop(path, None))

    def _deleted_lately(self) -> list[Row]:
        since = self._clock() - UNLOADED_WITHIN
        with self._database.read() as connection:
            return deployment_records.deleted_since(connection, since)

    def watched(self) -> list[WatchedDeployment]:
        """The deployments that need replicas and have a model."""
        with self._database.read() as connection:
            live = deployment_records.with_replicas(connection, ROW_COLUMNS)
            for row in live:
                if row["id"] not in self._models and not self._retries.is_waiting(row["id"]):
                    self._find_model(connection, row)
        known = {row["id"] for row in live}
        self._models = {name: model for name, model in self._models.items() if name in known}
        self._retries.keep_only(known)
        return [
            WatchedDeployment(row, self._models[row["id"]])
            for row in live
            if row["id"] in self._models
        ]

    def _find_model(self, connection: sa.Connection, row: Row) -> None:
        try:
            self._models[row["id"]] = self._lookup.find(
                connection, row["client_id"], row["model_name"]
            )
            # A failure to find the model is no failure to start: starts are counted from zero.
            self._retries.end(row["id"])
        except Exception as error:
            if is_away(error):
                raise
            # One model must not stop the others. The keeper records a missing one in the row.
            is_expected = isinstance(error, (ModelNotFound, DeploymentError))
            text = "a deployment's model cannot be used: %s"
            logger.warning(text, row["id"], exc_info=None if is_expected else error)
            self._retries.add(row["id"], error)

    async def _check(
        self,
        path: Path,
        watched: Sequence[WatchedDeployment],
        deleted: Sequence[Row],
        requests: int,
    ) -> None:
        """Check the replicas of one base model and the deployments that they serve.

        `deleted`: deployments of any base model that another member has deleted. `requests`: the group's count of
        requests for replicas when the rows were read.
        """
        group = self._replicas.of(path)
        try:
            await group.probe(PROBE_TIMEOUT_S)
            # A deployment that came since the rows were read has asked for replicas, which must stay.
            if group.ready_calls == requests:
                needed = {one.model for one in watched}
                for row in deleted:
                    model: str = row["model_name"]
                    base = self._lookup.catalogue.get(model.split(":")[1])
                    is_here = base is not None and base.path == path and model not in needed
                    # Its last requests are answered first.
                    if is_here and not self._in_flight.count(row["id"]):
                        await group.unload(model)
                await self._update(path, group, watched)
        except Exception:  # the next check tries again
            logger.exception("the health check of a base model failed")

    async def _update(
        self, path: Path, group: ReplicaGroup, watched: Sequence[WatchedDeployment]
    ) -> None:
        """Scale the replicas of a base model, start missing ones, and record what has changed."""
        watched = [
            replace(one, wanted=self._plan.decide(one.row, group, one.model)) for one in watched
        ]
        # The most demanding deployment decides. The default model stays loaded for the next one.
        is_kept = self._keeps_default and path == self._lookup.catalogue.default.path
        spare = 1 if is_kept else 0
        wanted = max((one.wanted for one in watched), default=0) or spare
        wanted_by_model: dict[str | None, int] = {}
        for one in watched:
            wanted_by_model[one.model] = max(one.wanted, wanted_by_model.get(one.model, 0))
        group.resize(wanted, wanted_by_model)
        self._log_news(group, watched)
        await self._tell_wanted(watched)

        running = [one for one in watched if one.row["status"] == DeploymentStatus.RUNNING]
        awake = [one for one in running if one.wanted and not is_asleep(one.row)]
        # The loss is recorded before new replicas start, which can take minutes.
        lost = [one for one in awake if not group.answering(one.model)]
        unhealthy = await self._write_changes([(one, UNHEALTHY) for one in lost])
        running = [one for one in running if one not in lost] + unhealthy
        await self._write_changes(await self._start_missing(group, running))

        # Adapters that no deployment needs now are unloaded; the replicas stay for others.
        for model, count in wanted_by_model.items():
            if model is not None and not count:
                await group.unload(model)
        self._log_news(group, watched)

    async def _tell_wanted(self, watched: Sequence[WatchedDeployment]) -> None:
        """Let the other members know on how many of the shared replicas each deployment is served."""
        changed = {
            one.id: one.wanted for one in watched if one.row["wanted_replicas"] != one.wanted
        }
        if self._shared is None or not self._leadership.leads or not changed:
            return

        def write() -> None:
            for deployment_id, wanted in changed.items():
                with self._database.write_beside() as connection:
                    deployment_records.note_wanted(connection, deployment_id, wanted)

        await self.threads.run(write)

    async def _start_missing(
        self, group: ReplicaGroup, running: Sequence[WatchedDeployment]
    ) -> list[RowChange]:
        """Start missing replicas, once for all deployments, and return the changes for their rows."""
        asleep = [one for one in running if not one.wanted]
        awake = [one for one in running if one.wanted]
        due = [one for one in awake if not self._retries.is_waiting(one.id)]
        changes: list[RowChange] = [(one, ASLEEP) for one in asleep]
        base_fault = await _fault(group, None) if due else None
        for one in due:
            fault = base_fault or await _fault(group, one.served.adapter)
            if isinstance(fault, NotStartedYet):
                continue  # the leader starts one
            if fault is not None:
                changes.append((one, self._failed_start(one, fault)))
                continue
            self._retries.end(one.id)
            count = min(one.wanted, group.answering(one.model))
            health = "healthy" if count else "unhealthy"
            changes.append((one, {"health": health, "current_replicas": count}))
        return changes

    def _failed_start(self, deployment: WatchedDeployment, error: Exception) -> dict[str, Any]:
        failures = self._retries.add(deployment.id, error)
        if isinstance(error, OSError):
            why = "a stored file cannot be read"
        elif isinstance(error, ServingError):
            why = str(error)
        else:
            kind = error_kind(error)
            why = (
                f"an internal error ({kind}), of which the operator finds more in the service's log"
            )
        text = f"start {failures} of {MAX_STARTS} failed: {why}"
        entry = LogEntry(deployment.id, self._clock(), "error", "replica", text)
        self._log.add(entry)
        if failures < MAX_STARTS:
            return UNHEALTHY
        message = f"the replicas ended and could not be started again: {why}"
        failure = {"code": "deployment_error", "message": message}
        return {**UNHEALTHY, "status": DeploymentStatus.FAILED, "error": failure}

    async def _write_changes(self, changes: Sequence[RowChange]) -> list[WatchedDeployment]:
        """Write the differences, and return the deployments whose rows nobody else has changed."""

        def write() -> list[WatchedDeployment]:
            kept = [one for one, values in changes if not _differs(one.row, values)]
            by_client: dict[str, list[RowChange]] = {}
            for one, values in changes:
                if _differs(one.row, values):
                    by_client.setdefault(one.row["client_id"], []).append((one, values))
            for client_id, own in by_client.items():
                with self._database.write(client_id) as connection:
                    for one, values in own:
                        now = self._clock()
                        row = {**one.row, **values, "updated_at": now}
                        if deployment_records.change_if_same(connection, one.row, now, **values):
                            kept.append(replace(one, row=row))
            return kept

        # The rows say what the leader's replicas do; it alone writes them.
        is_same = not any(_differs(one.row, values) for one, values in changes)
        if is_same or not self._leadership.leads:
            return [one for one, _ in changes]
        return await self.threads.run(write)

    def _log_news(self, group: ReplicaGroup, watched: Sequence[WatchedDeployment]) -> None:
        listeners = [Listener(one.id, one.model, one.wanted) for one in watched]
        news = self._news.entries(group, listeners, self._clock())
        # What happens to a shared replica is logged once.
        if news and (group.is_own or self._leadership.leads):
            self._log.add(*news)


async def _fault(group: ReplicaGroup, adapter: Adapter | None) -> Exception | None:
    """Make the replicas ready; the error if that fails."""
    try:
        await group.ready(adapter)
    except (ServingError, OSError) as error:
        return error
    except Exception as error:  # one deployment must not stop the others
        logger.exception("replicas could not be made ready")
        return error
    return None


def _differs(row: Row, changes: dict[str, Any]) -> bool:
    return any(name not in row or row[name] != value for name, value in changes.items())
