"""Notices when a caller disconnects, and stops sending to it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the caller has disconnected. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_while_connected(
    sending: Coroutine[Any, Any, None], receive: Receive, *ends: Coroutine[Any, Any, object]
) -> bool:
    """Run `sending` until it is done, the caller has disconnected, or one of `ends` is over; the rest is cancelled.

    Returns whether the caller is still connected. Raises what `sending` raises.
    """
    work = asyncio.create_task(sending)
    leaving = asyncio.create_task(wait_for_disconnect(receive))
    tasks = [work, leaving, *map(asyncio.create_task, ends)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        is_connected = not leaving.done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not work.cancelled() and (failure := work.exception()) is not None:
        raise failure
    return is_connected
