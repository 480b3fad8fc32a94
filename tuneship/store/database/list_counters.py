"""The lists of a tenant, each with a counter that changes in the same transaction as the rows: a page needs no count.

`rows.insert`, `rows.change` and `rows.remove` are the only ways into and out of a list. A counter is the
length of the list without filters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tuneship.store.database import tables
from tuneship.store.database.tables import TypedTable, resource_counts

DELETED = "deleted"
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class Listing(Generic[R_co]):
    """A list that clients see: the rows of one table, or those of one kind where the table holds several."""

    name: str
    table: "TypedTable[R_co]"
    kind: str | None = None
    is_deleted: bool | None = None
    """For tables that keep deleted rows for a while: whether the list shows the deleted rows or the others."""

    def filters(self, client_id: str) -> list[sa.ColumnElement[bool]]:
        """Conditions for the rows that a tenant's list shows."""
        where = [self.table.c.client_id == client_id]
        if self.kind is not None:
            where.append(self.table.c.kind == self.kind)
        if self.is_deleted is not None:
            is_deleted = self.table.c.status == DELETED
            where.append(is_deleted if self.is_deleted else ~is_deleted)
        return where

    def shows(self, row: Mapping[str, Any] | None) -> bool:
        """Whether the list of the row's tenant shows it; False for None."""
        return (
            row is not None
            and (self.kind is None or row["kind"] == self.kind)
            and (self.is_deleted is None or (row["status"] == DELETED) is self.is_deleted)
        )


DATASETS = Listing("datasets", tables.datasets)
JOBS = Listing("jobs", tables.jobs)
MODELS = Listing("models", tables.models)
DEPLOYMENTS = Listing("deployments", tables.deployments, is_deleted=False)
DELETED_DEPLOYMENTS = Listing("deleted", tables.deployments, is_deleted=True)
ENDPOINTS = Listing("plain", tables.endpoints, kind="plain", is_deleted=False)
WEBHOOKS = Listing("webhooks", tables.webhooks)
BATCHES = Listing("batches", tables.batches)
BATCH_FILES = Listing("batch_files", tables.batch_files)
CANARY_ENDPOINTS = Listing("canary", tables.endpoints, kind="canary", is_deleted=False)
# The others are counted by a query: deleted deployments are always filtered by their age, and webhooks are few. Lists
# of batches and their files have no total.
COUNTED: "tuple[Listing[Any], ...]" = (
    DATASETS,
    JOBS,
    MODELS,
    DEPLOYMENTS,
    ENDPOINTS,
    CANARY_ENDPOINTS,
)


def may_move(table: sa.Table, values: Mapping[str, Any]) -> bool:
    """Whether a change of these columns can move a row into or out of a list."""
    return "status" in values and any(
        listing.table is table and listing.is_deleted is not None for listing in COUNTED
    )


def count_change(
    connection: sa.Connection,
    table: sa.Table,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
) -> None:
    """Update the counters of the lists that a row enters or leaves; None: the row did not exist, or is deleted."""
    row = after or before
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    key = [resource_counts.c.client_id, resource_counts.c.resource]
    for listing in COUNTED:
        if row is None or listing.table is not table:
            continue
        step = listing.shows(after) - listing.shows(before)
        if step:
            counter = dialect.insert(resource_counts).values(
                client_id=row["client_id"], resource=listing.name, number=step
            )
            connection.execute(
                counter.on_conflict_do_update(
                    index_elements=key, set_={"number": resource_counts.c.number + step}
                )
            )


def number(connection: sa.Connection, listing: Listing[Any], client_id: str) -> int:
    """Length of a tenant's list, from its counter."""
    query = sa.select(resource_counts.c.number).where(
        resource_counts.c.client_id == client_id, resource_counts.c.resource == listing.name
    )
    return connection.execute(query).scalar() or 0
