"""Handler of events for callers that poll: the outbox as a list that resumes after the caller's last event."""

from collections.abc import Sequence

import sqlalchemy as sa

from tuneship.contract import events as contract
from tuneship.contract.events import EventPage
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.lists import log_page
from tuneship.store.database.tables import EventRow
from tuneship.store.records import outbox


@serves(contract.list_events)
def list_events(context: Context, limit: int = 100, after: str | None = None) -> EventPage:
    """Oldest first; the cursor is bound to the tenant."""

    def read(connection: sa.Connection, position: int) -> Sequence[EventRow]:
        return outbox.events_of(
            connection, context.client_id, context.now, after=position, limit=limit
        )

    log = f"events of {context.client_id}"
    page, cursor = log_page(context, log, after, read, lambda row: row["position"])
    return EventPage(events=[contract.event(dict(row)) for row in page], pagination=cursor)
