"""Cancels the work for a caller who has disconnected: nobody would read the answer."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from tuneship.contract.errors import InvalidRequestError

T = TypeVar("T")


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the caller has disconnected. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the caller disconnects. Raises `InvalidRequestError` then.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    raise InvalidRequestError("the caller disconnected")
