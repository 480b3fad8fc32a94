"""Keeps deployments as their rows say: loads what is being created or updated, drains and unloads what is deleted."""

import asyncio
import logging

import sqlalchemy as sa

from tuneship.contract.deployments import GONE, DeploymentStatus
from tuneship.contract.errors import ModelNotFound
from tuneship.service.context import Parts
from tuneship.service.models import ServedModel, served_model
from tuneship.serving.line import ServingError
from tuneship.store import rows, tables
from tuneship.store.blobs import sha256_of
from tuneship.store.events import emit
from tuneship.store.rows import Row

logger = logging.getLogger(__name__)

UNSETTLED = (DeploymentStatus.CREATING, DeploymentStatus.UPDATING, DeploymentStatus.DELETING)
DRAIN_S = 30.0
"""A deleted deployment takes no new request; those under way may last so long."""


class DeploymentKeeper:
    """Level-triggered: it compares rows with processes at every tick and remembers only what it works on."""

    def __init__(self, parts: Parts) -> None:
        """Nothing is loaded yet."""
        self._parts = parts
        self._working: dict[str, asyncio.Task[None]] = {}

    async def reconcile(self) -> None:
        """Start work on rows that are not settled."""
        for row in await asyncio.to_thread(self._unsettled):
            if row["id"] not in self._working:
                task = asyncio.create_task(self._settle(row))
                self._working[row["id"]] = task
                task.add_done_callback(lambda _, name=row["id"]: self._working.pop(name, None))

    def _unsettled(self) -> list[Row]:
        query = sa.select(tables.deployments).where(tables.deployments.c.status.in_(UNSETTLED))
        with self._parts.database.read() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    async def _settle(self, row: Row) -> None:
        try:
            if row["status"] == DeploymentStatus.DELETING:
                await self._remove(row)
            else:
                await self._serve(row)
        except Exception:  # one deployment must not stop the others; the next tick tries again
            logger.exception("a deployment could not be settled: %s", row["id"])
            await asyncio.sleep(1)

    async def _serve(self, row: Row) -> None:
        try:
            served = await asyncio.to_thread(self._checked_model, row)
            group = self._parts.replicas.of(served.base.path)
            group.wanted = max(group.wanted, row["min_replicas"], 1)
            replicas = await group.ready(served.adapter)
        except (ServingError, ModelNotFound, FilesDamaged, OSError) as error:
            failure = {
                "code": "deployment_error",
                "message": f"the model cannot be served: {error}",
            }
            await asyncio.to_thread(self._move, row, DeploymentStatus.FAILED, 0, failure)
            return
        await asyncio.to_thread(self._move, row, DeploymentStatus.RUNNING, len(replicas), None)

    def _checked_model(self, row: Row) -> ServedModel:
        with self._parts.database.read() as connection:
            served = served_model(connection, self._parts, row["client_id"], row["model_name"])
            model = rows.fetch(connection, tables.models, row["model_name"], client_id=None)
        if model is not None and served.adapter is not None:
            for name, digest in model["sha256"].items():
                if sha256_of(served.adapter.path / name) != digest:
                    raise FilesDamaged(f"the stored file {name} is damaged")
        return served

    async def _remove(self, row: Row) -> None:
        await self._parts.under_way.drained(row["id"], DRAIN_S)
        if not await asyncio.to_thread(self._is_needed, row):
            with_adapter = row["model_name"].startswith("ft:")
            base = row["model_name"].split(":")[1] if with_adapter else row["model_name"]
            found = self._parts.catalogue.get(base)
            if found is not None and with_adapter:
                await self._parts.replicas.of(found.path).forget(row["model_name"])
        await asyncio.to_thread(self._move, row, DeploymentStatus.DELETED, 0, None)

    def _is_needed(self, row: Row) -> bool:
        """Whether another live deployment serves the same model."""
        table = tables.deployments
        with self._parts.database.read() as connection:
            same = (table.c.model_name == row["model_name"]) & (table.c.id != row["id"])
            return rows.count(connection, table, same, table.c.status.not_in(GONE)) > 0

    def _move(
        self, row: Row, status: DeploymentStatus, replicas: int, error: dict[str, str] | None
    ) -> None:
        """Change the state unless the row was changed meanwhile: then the next tick sees it anew."""
        now, table = self._parts.clock(), tables.deployments
        with self._parts.database.write() as connection:
            found = rows.fetch(connection, table, row["id"], client_id=None)
            if found is None or found["updated_at"] != row["updated_at"]:
                return
            rows.change(
                connection,
                table,
                row["id"],
                now,
                status=status,
                current_replicas=replicas,
                error=error,
            )
            if status != row["status"]:
                change = {"from": row["status"], "to": status}
                emit(connection, "deployment.status_changed", dict(row), now, **change)
            if status is DeploymentStatus.DELETED:
                emit(connection, "deployment.deleted", dict(row), now, status=status)
            if error is not None:
                emit(connection, "deployment.error", dict(row), now, message=error["message"])

    async def warm(self) -> None:
        """After a restart: load again what was running."""
        status = tables.deployments.c.status
        query = sa.select(tables.deployments).where(status == DeploymentStatus.RUNNING)

        def running() -> list[Row]:
            with self._parts.database.read() as connection:
                return [dict(row) for row in connection.execute(query).mappings()]

        for row in await asyncio.to_thread(running):
            await self._settle(row)


class FilesDamaged(Exception):
    """A stored file differs from its digest."""
