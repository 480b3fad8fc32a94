"""Who did what in the tenant's name, and a signed head of the chain that seals it.

The chain is not verified here: that reads the rows of all tenants, and a service that vouches for itself proves little.
"""

from dataclasses import dataclass

from tuneship.contract.audit import AuditEntry, AuditHead, list_audit
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

ROWS = 100


@dataclass(frozen=True)
class AuditView:
    """One page of entries; `older` is the token of the next one."""

    entries: list[AuditEntry]
    head: AuditHead
    is_newest: bool
    older: str | None


@page("/console/audit", at=("Operate", 3), name="Audit", needs=list_audit, is_live=False)
async def audit(client: PageClient, after: str | None = None) -> AuditView:
    """Newest first."""
    found = await client.audit.list(limit=ROWS, after=after, order="desc")
    older = found.pagination.after if len(found.entries) == ROWS else None
    return AuditView(found.entries, await client.audit.head(), after is None, older)
