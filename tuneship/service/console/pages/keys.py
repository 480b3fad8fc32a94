"""The API keys of the tenant, without their secrets."""

from dataclasses import dataclass
from datetime import datetime

from tuneship.contract.api_keys import ApiKey, list_api_keys
from tuneship.contract.common import Offset, Pagination
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

ROWS = 50


@dataclass(frozen=True)
class KeysView:
    """One page of the list."""

    keys: list[ApiKey]
    pages: Pagination

    def state_of(self, key: ApiKey, now: datetime) -> str:
        """The state of a key, as `tuneship keys list` says it."""
        if key.revoked_at is not None:
            return "revoked"
        is_over = key.expires_at is not None and key.expires_at <= now
        return "expired" if is_over else "in force"


@page("/console/keys", at=("Operate", 2), name="Keys", needs=list_api_keys)
async def keys(client: PageClient, offset: Offset = 0) -> KeysView:
    """Newest first."""
    found = await client.api_keys.list(limit=ROWS, offset=offset)
    return KeysView(found.api_keys, found.pagination)
