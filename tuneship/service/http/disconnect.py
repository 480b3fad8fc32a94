"""Cancels the work for a caller who has disconnected, since nobody would read the answer, or whose key has ended."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from tuneship.contract.errors import ApiError, InvalidRequestError

T = TypeVar("T")


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


async def cancel_on_disconnect(
    request: Request, work: Coroutine[Any, Any, T], key_end: Coroutine[Any, Any, ApiError]
) -> T:
    """The result of `work`, which is cancelled when the caller disconnects or its key ends.

    Raises `InvalidRequestError` when the caller disconnects, and the result of `key_end`. The request's body must have
    been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_disconnect(request.receive))
    ending = asyncio.ensure_future(key_end)
    try:
        await asyncio.wait({working, leaving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if ending.done():
            raise ending.result()
    finally:
        leaving.cancel()
        ending.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    raise InvalidRequestError("the caller disconnected")
