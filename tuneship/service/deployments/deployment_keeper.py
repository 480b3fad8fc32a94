"""Makes deployments match their rows: loads those being created or updated, drains and unloads deleted ones.

Running deployments are checked by `replica_health.py`. Every member of a cluster loads the models of all deployments,
on replicas of its own or on those that all share (`shared_replicas.py`); what happens to a row is decided by the
leader, on what it sees of them.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import sqlalchemy as sa

from tuneship.contract.deployments import GONE, DeploymentStatus
from tuneship.contract.errors import DeploymentError, ModelNotFound
from tuneship.host.thread_pools import Threads
from tuneship.prompts.parity import Parity, reads_alike
from tuneship.prompts.text_tokenizer import encode
from tuneship.replicas.replica_groups import ReplicaGroups
from tuneship.replicas.replica_link import Adapter, FilesAway, NotStartedYet
from tuneship.service.access.capabilities import Capabilities
from tuneship.service.background.background_retries import BackgroundRetries, GivenUp
from tuneship.service.background.shutdown import end_tasks
from tuneship.service.catalogues.base_models import CatalogueFault
from tuneship.service.cluster.leadership import Leadership
from tuneship.service.cluster.shared_replicas import SharedReplicas
from tuneship.service.deployments.replica_health import UNHEALTHY, HealthChecks
from tuneship.service.deployments.scaling_decisions import ScalingDecisions, is_asleep
from tuneship.service.models.safeguards import SafeguardLost, check_kept, check_served
from tuneship.service.models.served_models import ModelLookup, ServedModel
from tuneship.service.telemetry.in_flight import InFlightGenerations
from tuneship.serving.replica_client import ServingError
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database, is_away
from tuneship.store.database.tables import DeploymentRow
from tuneship.store.files.blobs import FileDamaged
from tuneship.store.records import deployment_records

logger = logging.getLogger(__name__)

UNSETTLED = (DeploymentStatus.CREATING, DeploymentStatus.UPDATING, DeploymentStatus.DELETING)
# Models whose files are read at the same time.
MODELS_TOGETHER = 4


class FilesDamaged(Exception):
    """A stored file differs from its digest."""


CANNOT_BE_SERVED = (ModelNotFound, DeploymentError, FilesDamaged, CatalogueFault, OSError)


class DeploymentKeeper:
    """Compares rows with processes at every tick; its only memory is the work in progress."""

    def __init__(  # noqa: PLR0913 - all that it uses, by name
        self,
        *,
        database: Database,
        replicas: ReplicaGroups,
        models: ModelLookup,
        capabilities: Capabilities,
        in_flight: InFlightGenerations,
        clock: Callable[[], datetime],
        drain_s: float,
        plan: ScalingDecisions,
        health_checks: HealthChecks,
        leadership: Leadership,
        shared: SharedReplicas | None = None,
    ) -> None:
        """Start without loaded deployments. `shared`: the replicas are those of the whole cluster.

        `drain_s`: how long the generations of a deleted deployment may last.
        """
        self._replicas = replicas
        self._models = models
        self._capabilities = capabilities
        self._in_flight = in_flight
        self._clock = clock
        self._drain_s = drain_s
        self._plan = plan
        self._health_checks = health_checks
        self._shared = shared
        self._leadership = leadership
        self._database = database.fenced(leadership.fence)
        self._working: dict[str, asyncio.Task[None]] = {}
        self._retries = BackgroundRetries(clock)
        self._records = Threads("deployment records", 4)
        # Apart from the records: a model on a file system that hangs delays no other deployment's row.
        self._files = Threads("deployment files", MODELS_TOGETHER)

    @property
    def threads(self) -> tuple[Threads, ...]:
        """All threads that it uses."""
        return (self._records, self._files, self._health_checks.threads)

    async def reconcile(self) -> bool:
        """Start work on unsettled rows, and a health check when one is due; return whether there are any rows."""
        is_unsettled = tables.deployments.c.status.in_(UNSETTLED)
        unsettled = await self._records.run(self._rows, is_unsettled)
        for row in unsettled:
            if row["is_forced"]:
                self._in_flight.end_all(row["id"])
        if self._leadership.leads:
            self._retries.keep_only({row["id"] for row in unsettled})
            for row in unsettled:
                if row["id"] not in self._working and not self._retries.is_waiting(row["id"]):
                    task = asyncio.create_task(self._settle(row))
                    self._working[row["id"]] = task
                    task.add_done_callback(lambda _, name=row["id"]: self._working.pop(name, None))
        self._health_checks.start_when_due()
        return bool(unsettled)

    def _rows(self, condition: sa.ColumnElement[bool]) -> list[DeploymentRow]:
        with self._database.read() as connection:
            return rows.matching(connection, tables.deployments, condition)

    async def _settle(self, row: DeploymentRow) -> None:
        given_up = self._retries.given_up(row["id"])
        try:
            if row["status"] == DeploymentStatus.DELETING:
                await self._remove(row, given_up)
            elif given_up is not None:
                await self._record_failure(row, given_up)
            else:
                # The replicas that serve now go on until the new ones are ready and checked.
                try:
                    served = await self._files.run(self._checked_model, row)
                except CANNOT_BE_SERVED as error:
                    await self._record_failure(row, error)
                else:
                    await self._load(row, served)
        except Exception as error:  # one deployment must not stop the others
            logger.exception("a deployment could not be settled: %s", row["id"])
            self._retries.add(row["id"], error)
        else:
            self._retries.end(row["id"])

    async def _load(self, row: DeploymentRow, served: ServedModel) -> None:
        """Make replicas and adapter ready, then set the row to `running`; to `failed` if that is not possible."""
        group = self._replicas.of(served.base.path)
        wanted = max(1, self._plan.replicas(row))
        try:
            check_served(self._capabilities, row["security_settings"], served)
            await group.ready(served.adapter, wanted)
        except (FilesAway, NotStartedYet):
            raise  # the next try finds the files again, or replicas of the leader
        except (SafeguardLost, ServingError) as error:
            await self._record_failure(row, error)
            return
        model = None if served.adapter is None else served.adapter.name
        await self._records.run(
            self._change,
            row,
            status=DeploymentStatus.RUNNING,
            health="healthy",
            current_replicas=min(wanted, group.answering(model)),
            error=None,
        )

    async def _record_failure(self, row: DeploymentRow, error: Exception) -> None:
        why = "a stored file cannot be read" if isinstance(error, OSError) else str(error)
        failure = {"code": "deployment_error", "message": f"the model cannot be served: {why}"}
        changes = {"status": DeploymentStatus.FAILED, **UNHEALTHY, "error": failure}
        await self._records.run(self._change, row, **changes)

    def _checked_model(self, row: DeploymentRow) -> ServedModel:
        """The model of a deployment, after its files were read and checked. Raises `CANNOT_BE_SERVED`."""
        with self._database.read() as connection:
            served = self._models.served(connection, row["client_id"], row["model_name"])
        # Read here, so that a base model that was damaged later fails the deployment by name.
        _ = served.format
        if served.adapter is not None and served.files is not None:
            try:
                with self._models.blobs.fetched(served.files, is_checked=True):
                    check_tokens(served, served.adapter)
            except FileDamaged as damage:
                raise FilesDamaged(f"the stored file {damage.name} is damaged") from None
        return served

    async def _remove(self, row: DeploymentRow, given_up: GivenUp | None) -> None:
        """Drain and unload a deployment, and set its row to `deleted`.

        Where unloading was given up, the adapter stays until its replica ends; the deployment is deleted all the same.
        """
        if given_up is None:
            await self._in_flight.wait_until_drained(row["id"], self._drain_s)
            if self._shared is not None:
                await self._shared.demand.wait_until_drained(row["id"], self._drain_s)
            name = row["model_name"]
            if name.startswith("ft:") and not await self._records.run(self._is_needed, row):
                base = self._models.catalogue.get(name.split(":")[1])
                if base is not None:
                    await self._replicas.of(base.path).unload(name)
        await self._records.run(
            self._change, row, status=DeploymentStatus.DELETED, current_replicas=0, error=None
        )

    def _is_needed(self, row: DeploymentRow) -> bool:
        """Whether another live deployment serves the same model."""
        table = tables.deployments
        with self._database.read() as connection:
            same = (table.c.model_name == row["model_name"]) & (table.c.id != row["id"])
            return rows.count(connection, table, same, table.c.status.not_in(GONE)) > 0

    def _change(self, row: DeploymentRow, **changes: Any) -> None:
        if not self._leadership.leads:
            return
        # If the row was changed meanwhile, nothing is written: the next tick sees it again.
        with self._database.write(row["client_id"]) as connection:
            deployment_records.change_if_same(connection, row, self._clock(), **changes)

    async def warm(self) -> None:
        """Load again the deployments that ran before a restart and were not asleep, then start the health checks."""
        if self._shared is not None:
            await self._shared.attached.has_looked.wait()
        by_model: dict[str, list[DeploymentRow]] = {}
        is_running = tables.deployments.c.status == DeploymentStatus.RUNNING
        for row in await self._records.run(self._rows, is_running):
            if not is_asleep(row):
                by_model.setdefault(row["model_name"], []).append(row)
                continue
            try:
                check_kept(self._capabilities, row["security_settings"])
            except SafeguardLost as error:
                await self._record_failure(row, error)
        slots = asyncio.Semaphore(MODELS_TOGETHER)
        await asyncio.gather(*(self._warm_model(rows, slots) for rows in by_model.values()))
        self._health_checks.begin()

    async def _warm_model(
        self, deployments: Sequence[DeploymentRow], slots: asyncio.Semaphore
    ) -> None:
        """Load all deployments of one model; its files are read and checked once."""
        async with slots:
            try:
                served = await self._files.run(self._checked_model, deployments[0])
            except CANNOT_BE_SERVED as error:
                for row in deployments:
                    await self._record_failure(row, error)
                return
            except Exception as error:
                # One model must not stop the others; the health checks go on with it.
                if is_away(error):
                    raise
                logger.exception("a model could not be loaded again: %s", deployments[0]["id"])
                return
            for row in deployments:
                try:
                    await self._load(row, served)
                except NotStartedYet:
                    continue  # the health checks load it when the leader has started a replica
                except Exception:  # must not stop the others; the health checks go on with it
                    logger.exception("a deployment could not be loaded again: %s", row["id"])

    async def stop(self, timeout_s: float) -> None:
        """Stop all work at the end of the service. No row changes: the end is no fault of any deployment."""
        await end_tasks([*self._working.values(), *self._health_checks.tasks], timeout_s)


def check_tokens(served: ServedModel, adapter: Adapter) -> None:
    """Raises `FilesDamaged` if a text has other tokens now than when the adapter was tuned."""
    try:
        parity = Parity.load(adapter.path, adapter.key)
    except ValueError as error:
        raise FilesDamaged(str(error)) from error
    tokens = partial(encode, served.base.tokenizer)
    if parity is not None and not reads_alike(parity, served.template, tokens):
        raise FilesDamaged(
            "prompt template and tokenizer are not those that the model was tuned with"
        )
