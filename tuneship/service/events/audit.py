"""Handler of the audit chain, and its signed heads. Its entries are made from `access/audit_facts.py`."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import sqlalchemy as sa

from tuneship.contract import audit as contract
from tuneship.contract.audit import AuditEntry, AuditHead, AuditPage
from tuneship.contract.errors import ResourceNotFound
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.lists import log_page
from tuneship.store.database.database import Database
from tuneship.store.database.tables import AuditRow
from tuneship.store.records import audit
from tuneship.store.records.audit_heads import Head, Heads

# Removing the chain's last rows leaves no trace only if they are younger than the last signed head.
HEAD_EVERY_S = 60.0


# On Postgres rows are linked so soon after their commit.
LINK_EVERY_S = 0.2


def sign_head(database: Database, heads: Heads, now: datetime) -> None:
    """Write a signed head if the chain has grown. `heads` is best kept append-only and on another machine."""
    with database.read() as connection:
        head = Head(*audit.head_of(connection))
    # Outside the transaction: a slow disk, or one on another machine, must not hold a snapshot open.
    heads.append(head, now)


@serves(contract.list_audit)
def list_audit(
    context: Context,
    limit: int = 100,
    after: str | None = None,
    order: Literal["asc", "desc"] = "asc",
) -> AuditPage:
    """The cursor is bound to the tenant and the order."""
    is_newest_first = order == "desc"

    def read(connection: sa.Connection, position: int) -> Sequence[AuditRow]:
        tenant = context.client_id
        if is_newest_first:
            return audit.newest_of(connection, tenant, before=position, limit=limit)
        return audit.page_of(connection, tenant, after=position, limit=limit)

    # The rows of answers that were sent before this request are in its list.
    context.parts.audit.link_all(context.parts.database)
    log = f"audit of {context.client_id}" + (", newest first" if is_newest_first else "")
    page, cursor = log_page(context, log, after, read, lambda row: row["seq"])
    return AuditPage(entries=[AuditEntry.model_validate(row) for row in page], pagination=cursor)


@serves(contract.get_audit_head)
def get_audit_head(context: Context, seq: int | None = None) -> AuditHead:
    """Sign the row as the database has it; only `tuneship audit verify` looks at the rows before it."""
    parts = context.parts
    parts.audit.link_all(parts.database)
    with parts.database.read() as connection:
        if seq is None:
            head = Head(*audit.head_of(connection))
        elif found := audit.rows_at(connection, [seq]):
            head = Head(seq, found[0]["mac"])
        else:
            raise ResourceNotFound("the audit chain has no such row")
    return parts.audit_heads.signed(head, context.now)
