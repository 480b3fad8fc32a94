"""Events to be fetched instead of received: the outbox as a list that goes on where the caller stopped."""

from tuneship.contract import events as contract
from tuneship.contract.common import LogCursor
from tuneship.contract.events import EventPage
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.store import outbox as events


@serves(contract.list_events)
def list_events(context: Context, limit: int = 100, after: str | None = None) -> EventPage:
    """Oldest first; the cursor is bound to the tenant."""
    cursors, list_of = context.parts.cursors, f"events of {context.client_id}"
    position = 0 if after is None else cursors.position(list_of, after)
    with context.read() as connection:
        found = events.events_of(
            connection, context.client_id, context.now, after=position, limit=limit
        )
    last = cursors.issue(list_of, found[-1]["position"]) if found else after
    return EventPage(
        events=[contract.event(dict(row)) for row in found], pagination=LogCursor(after=last)
    )
