"""Limits how long a caller may take to send a body, so that a half-sent request does not hold a connection.

Knows no framework.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tuneship.contract.errors import InvalidRequestError

IDLE_S = 15.0
JSON_BODY_S = 30.0
WINDOW_S = 30.0
# The average over each window: a fast beginning does not pay for a crawl afterwards.
SLOWEST_BYTES_PER_S = 64 << 10


class BodyTimeout:
    """Wraps an ASGI `receive`. Raises 408 when the body stops coming, or comes too slowly."""

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` counts seconds, of which only those count in which the service waits for the caller."""
        media = dict(scope["headers"]).get(b"content-type", b"")
        self._is_upload = media.startswith(b"multipart/")
        self._receive = receive
        self._idle_s = idle_s
        self._clock = clock
        self._waited_s = 0.0
        self._window_s, self._window_bytes = 0.0, 0
        self._is_complete = False

    async def receive(self) -> Any:
        """The next message; after the body only a disconnect can come, and that may take any time."""
        if self._is_complete:
            return await self._receive()
        began = self._clock()
        left_s = self._idle_s
        if not self._is_upload:
            left_s = min(left_s, JSON_BODY_S - self._waited_s)
        try:
            async with asyncio.timeout(left_s):
                message = await self._receive()
        except TimeoutError:
            raise InvalidRequestError("the body did not come in time", status=408) from None
        self._is_complete = not message.get("more_body", False)

        waited_s = self._clock() - began
        self._waited_s += waited_s
        self._window_s += waited_s
        self._window_bytes += len(message.get("body", b""))
        if self._window_s >= WINDOW_S:
            if self._window_bytes < self._window_s * SLOWEST_BYTES_PER_S:
                raise InvalidRequestError("the body came too slowly", status=408)
            self._window_s, self._window_bytes = 0.0, 0
        return message
