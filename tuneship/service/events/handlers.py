"""Handler of events for callers that poll: the outbox as a list that resumes after the caller's last event."""

from tuneship.contract import events as contract
from tuneship.contract.common import LogCursor
from tuneship.contract.events import EventPage
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.store import outbox as events


@serves(contract.list_events)
def list_events(context: Context, limit: int = 100, after: str | None = None) -> EventPage:
    """Oldest first; the cursor is bound to the tenant."""
    cursors, bound_to = context.parts.cursors, f"events of {context.client_id}"
    position = 0 if after is None else cursors.position(bound_to, after)
    with context.read() as connection:
        page = events.events_of(
            connection, context.client_id, context.now, after=position, limit=limit
        )
    last = cursors.issue(bound_to, page[-1]["position"]) if page else after
    return EventPage(
        events=[contract.event(dict(row)) for row in page], pagination=LogCursor(after=last)
    )
