"""Keeps deployments as their rows say: loads what is being created or updated, drains and unloads what is deleted.

What runs is looked after by `replica_health.py`.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tuneship.contract.deployments import GONE, DeploymentStatus
from tuneship.contract.errors import DeploymentError, ModelNotFound
from tuneship.host.thread_pools import Threads
from tuneship.parity import Parity, reads_alike
from tuneship.runtime.replica_protocol import Adapter
from tuneship.security.sealed_files import ObjectDamaged
from tuneship.service.catalogues.base_models import CatalogueFault
from tuneship.service.common.background_retries import BackgroundRetries, GivenUp
from tuneship.service.common.shutdown import end_tasks
from tuneship.service.context.context import Parts
from tuneship.service.deployments.replica_health import UNHEALTHY, HealthChecks
from tuneship.service.deployments.replica_plan import ReplicaPlan, is_asleep
from tuneship.service.models.handlers import ServedModel, served_model
from tuneship.service.models.safeguards import SafeguardLost, check_kept, check_served
from tuneship.serving.replica_client import ServingError
from tuneship.store import deployment_records, tables
from tuneship.store import queries as rows
from tuneship.store.blobs import check_digest
from tuneship.store.database import is_away
from tuneship.store.queries import Row

logger = logging.getLogger(__name__)

UNSETTLED = (DeploymentStatus.CREATING, DeploymentStatus.UPDATING, DeploymentStatus.DELETING)
# Whose files are read at the same time.
MODELS_AT_ONCE = 4
# A deleted deployment takes no new request; those under way may last so long.
DRAIN_S = 30.0


class FilesDamaged(Exception):
    """A stored file differs from its digest."""


CANNOT_BE_SERVED = (ModelNotFound, DeploymentError, FilesDamaged, OSError)


class DeploymentKeeper:
    """Level-triggered: it compares rows with processes at every tick and remembers only what it works on."""

    def __init__(self, parts: Parts) -> None:
        """Nothing is loaded yet."""
        self._parts = parts
        self._working: dict[str, asyncio.Task[None]] = {}
        self._troubles = BackgroundRetries(parts.clock)
        self._plan = ReplicaPlan(parts)
        self._rounds = HealthChecks(parts, self._plan)
        self._records = Threads("deployment records", 4)
        self._files = Threads("deployment files", MODELS_AT_ONCE)
        """Apart from the records: a model on a file system that hangs holds up no other deployment's row."""

    @property
    def threads(self) -> tuple[Threads, ...]:
        """All that it uses."""
        return (self._records, self._files, self._rounds.threads)

    async def reconcile(self) -> None:
        """Start work on rows that are not settled, and a round when one is due."""
        unsettled = await self._records.run(self._unsettled)
        self._troubles.keep_only({row["id"] for row in unsettled})
        for row in unsettled:
            if row["id"] not in self._working and not self._troubles.is_waiting(row["id"]):
                task = asyncio.create_task(self._settle(row))
                self._working[row["id"]] = task
                task.add_done_callback(lambda _, name=row["id"]: self._working.pop(name, None))
        self._rounds.start_when_due()

    def _unsettled(self) -> list[Row]:
        query = sa.select(tables.deployments).where(tables.deployments.c.status.in_(UNSETTLED))
        with self._parts.database.read() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    async def _settle(self, row: Row) -> None:
        given_up = self._troubles.given_up(row["id"])
        try:
            if row["status"] == DeploymentStatus.DELETING:
                await self._remove(row, given_up)
            elif given_up is not None:
                await self._failed(row, given_up)
            else:
                await self._serve(row)
        except Exception as error:  # one deployment must not stop the others
            logger.exception("a deployment could not be settled: %s", row["id"])
            self._troubles.add(row["id"], error)
        else:
            self._troubles.end(row["id"])

    async def _serve(self, row: Row) -> None:
        """Replicas and adapter ready and checked before the row says so; those that serve go on meanwhile."""
        try:
            served = await self._files.run(self._checked_model, row)
        except CANNOT_BE_SERVED as error:
            await self._failed(row, error)
            return
        await self._load(row, served)

    async def _load(self, row: Row, served: ServedModel) -> None:
        group = self._parts.replicas.of(served.base.path)
        wanted = max(1, self._plan.replicas(row))
        try:
            check_served(self._parts, row["security_settings"], served)
            await group.ready(served.adapter, wanted)
        except (SafeguardLost, ServingError) as error:
            await self._failed(row, error)
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

    async def _failed(self, row: Row, error: Exception) -> None:
        why = "a stored file cannot be read" if isinstance(error, OSError) else str(error)
        failure = {"code": "deployment_error", "message": f"the model cannot be served: {why}"}
        changes = {"status": DeploymentStatus.FAILED, **UNHEALTHY, "error": failure}
        await self._records.run(self._change, row, **changes)

    def _checked_model(self, row: Row) -> ServedModel:
        with self._parts.database.read() as connection:
            served = served_model(connection, self._parts, row["client_id"], row["model_name"])
            model = rows.fetch(connection, tables.models, row["model_name"], client_id=None)
        try:
            _ = served.base.tokenizer
        except CatalogueFault as fault:
            raise FilesDamaged(f"the base model cannot be used: {fault}") from fault
        if model is not None and served.adapter is not None:
            for name, digest in model["sha256"].items():
                try:
                    check_digest(served.adapter.path / name, digest)
                except ObjectDamaged:
                    raise FilesDamaged(f"the stored file {name} is damaged") from None
            _check_reading(served, served.adapter)
        return served

    async def _remove(self, row: Row, given_up: GivenUp | None) -> None:
        """Where unloading was given up, the adapter goes with its replica; the deployment is deleted all the same."""
        if given_up is None:
            await self._parts.in_flight.wait_until_drained(row["id"], DRAIN_S)
            await self._unload(row)
        await self._records.run(
            self._change, row, status=DeploymentStatus.DELETED, current_replicas=0, error=None
        )

    async def _unload(self, row: Row) -> None:
        if not row["model_name"].startswith("ft:") or await self._records.run(self._is_needed, row):
            return
        found = self._parts.catalogue.get(row["model_name"].split(":")[1])
        if found is not None:
            await self._parts.replicas.of(found.path).forget(row["model_name"])

    def _is_needed(self, row: Row) -> bool:
        """Whether another live deployment serves the same model."""
        table = tables.deployments
        with self._parts.database.read() as connection:
            same = (table.c.model_name == row["model_name"]) & (table.c.id != row["id"])
            return rows.count(connection, table, same, table.c.status.not_in(GONE)) > 0

    def _change(self, row: Row, **changes: Any) -> None:
        """Unless the row was changed meanwhile: then the next tick sees it again."""
        with self._parts.database.write() as connection:
            deployment_records.change_if_same(connection, row, self._parts.clock(), **changes)

    async def warm(self) -> None:
        """After a restart: load again what was running and did not sleep; only then rounds begin."""
        by_model: dict[str, list[Row]] = {}
        for row in await self._records.run(self._running):
            if not is_asleep(row):
                by_model.setdefault(row["model_name"], []).append(row)
                continue
            try:
                check_kept(self._parts, row["security_settings"])
            except SafeguardLost as error:
                await self._failed(row, error)
        room = asyncio.Semaphore(MODELS_AT_ONCE)
        await asyncio.gather(*(self._warm_model(rows, room) for rows in by_model.values()))
        self._rounds.begin()

    def _running(self) -> list[Row]:
        status = tables.deployments.c.status
        query = sa.select(tables.deployments).where(status == DeploymentStatus.RUNNING)
        with self._parts.database.read() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    async def _warm_model(self, deployments: Sequence[Row], room: asyncio.Semaphore) -> None:
        """All deployments of one model: its files are read and checked once."""
        async with room:
            try:
                served = await self._files.run(self._checked_model, deployments[0])
            except CANNOT_BE_SERVED as error:
                for row in deployments:
                    await self._failed(row, error)
                return
            except Exception as error:
                # One model must not stop the others; the rounds go on with it.
                if is_away(error):
                    raise
                logger.exception("a model could not be loaded again: %s", deployments[0]["id"])
                return
            for row in deployments:
                try:
                    await self._load(row, served)
                except Exception:  # one must not stop the others; the rounds go on with it
                    logger.exception("a deployment could not be loaded again: %s", row["id"])

    async def stop(self, patience_s: float) -> None:
        """The service ends, and its replicas with it: that is no fault of any deployment."""
        await end_tasks([*self._working.values(), *self._rounds.under_way], patience_s)


def _check_reading(served: ServedModel, adapter: Adapter) -> None:
    """A model answers well only to the tokens that it was tuned to read. Raises `FilesDamaged`."""
    try:
        parity = Parity.load(adapter.path, adapter.key)
    except ValueError as error:
        raise FilesDamaged(str(error)) from error
    tokenizer: Any = served.base.tokenizer

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    if parity is not None and not reads_alike(parity, served.template, encode):
        raise FilesDamaged(
            "prompt template and tokenizer are not those that the model was tuned with"
        )
