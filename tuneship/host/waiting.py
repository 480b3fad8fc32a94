"""Waiting on the event loop."""

import asyncio
from contextlib import suppress


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Return when the event is set or when the timeout has passed, whichever comes first."""
    # Not `asyncio.wait_for`: that of Python 3.11 may swallow a cancellation.
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
