"""How long a caller may take to send a body: a half-sent request must not hold a connection. Knows no framework."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tuneship.contract.errors import InvalidRequestError

IDLE_S = 15.0
JSON_BODY_S = 30.0
WINDOW_S = 30.0
# Bytes a second, on average over each window: what came fast before does not pay for a crawl
# afterwards.
SLOWEST_UPLOAD = 64 << 10


class BodyTimeout:
    """Wraps an ASGI `receive`. Raises 408 when the body stops coming, or comes too slowly."""

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` counts seconds; only those count in which the service waits for the caller."""
        media = dict(scope["headers"]).get(b"content-type", b"")
        self._is_upload = media.startswith(b"multipart/")
        self._receive = receive
        self._idle_s = idle_s
        self._clock = clock
        self._waited = 0.0
        self._window_waited, self._window_size = 0.0, 0
        self._whole = False

    async def receive(self) -> Any:
        """The next message; after the body only a disconnect can come, and that may take any time."""
        if self._whole:
            return await self._receive()
        began = self._clock()
        left = self._idle_s if self._is_upload else min(self._idle_s, JSON_BODY_S - self._waited)
        try:
            async with asyncio.timeout(left):
                message = await self._receive()
        except TimeoutError:
            raise InvalidRequestError("the body did not come in time", status=408) from None
        self._whole = not message.get("more_body", False)
        self._count(self._clock() - began, len(message.get("body", b"")))
        return message

    def _count(self, waited: float, size: int) -> None:
        self._waited += waited
        self._window_waited += waited
        self._window_size += size
        if self._window_waited < WINDOW_S:
            return
        if self._window_size < self._window_waited * SLOWEST_UPLOAD:
            raise InvalidRequestError("the body came too slowly", status=408)
        self._window_waited, self._window_size = 0.0, 0
