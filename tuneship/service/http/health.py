"""The health checks, which need no key: whether the process lives, and whether it can serve requests now.

`/healthz` checks nothing but the process: to restart a service because its database is away makes things worse.
`/readyz` is 503 while the service drains, while the database cannot be read or written, and in a cluster while the
database's clock cannot be read.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from tuneship.contract.errors import InternalError
from tuneship.service.access.capabilities import Capabilities
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.dialect import json_response
from tuneship.service.http.responses import error_response

# A check may wait this long, e.g. behind another writer.
CHECK_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


def alive(capabilities: Capabilities) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of `/healthz`."""

    async def answer(_request: Request) -> Response:
        return json_response(200, {"status": "ok", "capabilities": capabilities.able})

    return answer


class Readiness:
    """Answers `/readyz` from a check that runs at most once in `fresh_s` seconds, however many callers ask."""

    def __init__(self, boundary: Boundary) -> None:
        """`ready_for_s`: how often the check may run at most, since it writes and callers need no key for it."""
        self._parts = boundary.parts
        self._is_fit = boundary.is_fit
        self._fresh_s = boundary.ready_for_s
        self._checked_at = -boundary.ready_for_s
        self._checking: asyncio.Task[bool] | None = None
        self._is_ready = True

    async def answer(self, request: Request) -> Response:
        """200, or 503 with the reason."""
        if self._parts.drain.is_announced:
            error = InternalError("the service is shutting down", status=503)
        elif not await self._can_write():
            error = InternalError("the database takes no writes", status=503, retry_after=2)
        elif not self._is_fit():
            error = InternalError("the time is not known", status=503, retry_after=2)
        else:
            return json_response(200, {"status": "ok"})
        return error_response(request, error)

    async def _can_write(self) -> bool:
        if self._checking is None or self._checking.done():
            if time.monotonic() - self._checked_at < self._fresh_s:
                return self._is_ready
            self._checking = asyncio.create_task(self._check())
        checking = self._checking
        await asyncio.wait({checking}, timeout=CHECK_TIMEOUT_S)
        return checking.done() and not checking.cancelled() and checking.result()

    async def _check(self) -> bool:
        was_ready = self._is_ready
        try:
            await self._parts.threads.health.run("", self._parts.database.check_writable)
        except Exception as error:
            self._is_ready = False
            if was_ready:
                logger.warning("not ready: the database takes no writes", exc_info=error)
        else:
            self._is_ready = True
            if not was_ready:
                logger.info("ready again: the database takes writes")
        self._checked_at = time.monotonic()
        return self._is_ready
