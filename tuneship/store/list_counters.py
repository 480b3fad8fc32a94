"""The lists of a tenant, each with a counter that changes in the transaction of the rows: a page needs no count.

`rows.insert`, `rows.change` and `rows.remove` are the only ways in and out of a list. What is counted is what a list
shows without a filter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tuneship.store import tables
from tuneship.store.tables import resource_counts

DELETED = "deleted"


@dataclass(frozen=True)
class Listing:
    """Rows of a table, of one kind where it holds several."""

    name: str
    table: sa.Table
    kind: str | None = None
    is_deleted: bool | None = None
    """Where deleted rows stay for a while: whether the list shows these or the others."""

    def of(self, client_id: str) -> list[sa.ColumnElement[bool]]:
        """What a tenant's list shows."""
        where = [self.table.c.client_id == client_id]
        if self.kind is not None:
            where.append(self.table.c.kind == self.kind)
        if self.is_deleted is not None:
            is_deleted = self.table.c.status == DELETED
            where.append(is_deleted if self.is_deleted else ~is_deleted)
        return where

    def shows(self, row: Mapping[str, Any] | None) -> bool:
        """The same for a row; no row is not shown."""
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
CANARY_ENDPOINTS = Listing("canary", tables.endpoints, kind="canary", is_deleted=False)
COUNTED = (DATASETS, JOBS, MODELS, DEPLOYMENTS, ENDPOINTS, CANARY_ENDPOINTS)


def may_move(table: sa.Table, values: Mapping[str, Any]) -> bool:
    """Whether a change of these columns can take a row out of a list."""
    return "status" in values and any(
        listing.table is table and listing.is_deleted is not None for listing in COUNTED
    )


def moved(
    connection: sa.Connection,
    table: sa.Table,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
) -> None:
    """Count a row into the lists that show it now, and out of those that did."""
    row = after or before
    for listing in COUNTED:
        if row is not None and listing.table is table:
            step = listing.shows(after) - listing.shows(before)
            if step:
                _add(connection, row["client_id"], listing.name, step)


def _add(connection: sa.Connection, client_id: str, name: str, step: int) -> None:
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    row = dialect.insert(resource_counts).values(client_id=client_id, resource=name, number=step)
    key = [resource_counts.c.client_id, resource_counts.c.resource]
    connection.execute(
        row.on_conflict_do_update(
            index_elements=key, set_={"number": resource_counts.c.number + step}
        )
    )


def number(connection: sa.Connection, listing: Listing, client_id: str) -> int:
    """How many rows a tenant's list has."""
    query = sa.select(resource_counts.c.number).where(
        resource_counts.c.client_id == client_id, resource_counts.c.resource == listing.name
    )
    return connection.execute(query).scalar() or 0
