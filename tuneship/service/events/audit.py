"""Handlers of the audit chain and its signed heads. Its entries are made in `access/audit_trail.py`."""

from datetime import datetime

from tuneship.contract import audit as contract
from tuneship.contract.audit import AuditEntry, AuditPage
from tuneship.contract.common import LogCursor
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.store import audit
from tuneship.store.audit_heads import Head, Heads
from tuneship.store.database import Database

# Rows of this time at most can be taken from the end of the chain without a trace.
HEAD_EVERY_S = 60.0


def sign_head(database: Database, heads: Heads, now: datetime) -> None:
    """Write a head if the chain has grown. `heads`: best a place that only takes additions, on another machine."""
    with database.read() as connection:
        head = Head(*audit.head_of(connection))
    heads.append(head, now)


@serves(contract.list_audit)
def list_audit(context: Context, limit: int = 100, after: str | None = None) -> AuditPage:
    """Oldest first; the cursor is bound to the tenant."""
    cursors, list_of = context.parts.cursors, f"audit of {context.client_id}"
    position = 0 if after is None else cursors.position(list_of, after)
    with context.read() as connection:
        found = audit.page_of(connection, context.client_id, after=position, limit=limit)
    last = cursors.issue(list_of, found[-1]["seq"]) if found else after
    return AuditPage(
        entries=[AuditEntry.model_validate(row) for row in found], pagination=LogCursor(after=last)
    )
