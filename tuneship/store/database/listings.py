"""The lists that clients see."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import sqlalchemy as sa

from tuneship.store.database import tables
from tuneship.store.database.tables import TypedTable

DELETED = "deleted"
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class Listing(Generic[R_co]):
    """A list for clients: the rows of one table, or of one kind in a table with several kinds."""

    table: "TypedTable[R_co]"
    kind: str | None = None
    # For tables that keep deleted rows for a while: whether the list shows the deleted rows or the others.
    is_deleted: bool | None = None

    def filters(self, client_id: str) -> list[sa.ColumnElement[bool]]:
        """Conditions for the rows that a tenant's list shows."""
        where = [self.table.c.client_id == client_id]
        if self.kind is not None:
            where.append(self.table.c.kind == self.kind)
        if self.is_deleted is not None:
            is_deleted = self.table.c.status == DELETED
            where.append(is_deleted if self.is_deleted else ~is_deleted)
        return where


DATASETS = Listing(tables.datasets)
JOBS = Listing(tables.jobs)
MODELS = Listing(tables.models)
DEPLOYMENTS = Listing(tables.deployments, is_deleted=False)
DELETED_DEPLOYMENTS = Listing(tables.deployments, is_deleted=True)
ENDPOINTS = Listing(tables.endpoints, kind="plain", is_deleted=False)
CANARY_ENDPOINTS = Listing(tables.endpoints, kind="canary", is_deleted=False)
WEBHOOKS = Listing(tables.webhooks)
API_KEYS = Listing(tables.api_keys)
BATCHES = Listing(tables.batches)
BATCH_FILES = Listing(tables.batch_files)
EVALUATIONS = Listing(tables.evaluations)
EVALS = Listing(tables.evals)
RELEASES = Listing(tables.releases)
