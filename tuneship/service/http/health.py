"""What anybody may ask without a key: whether the process lives, and whether it can serve requests now.

`/healthz` looks at nothing but the process: whoever restarts a service because its database is away makes things
worse. `/readyz` is 503 while the service drains, and while the database cannot be read or written.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import sqlalchemy as sa
from starlette.requests import Request
from starlette.responses import Response

from tuneship.contract.errors import InternalError
from tuneship.service.context.context import Parts
from tuneship.service.http.answers import error_response, json_response
from tuneship.service.models.safeguards import capabilities

# How long an answer of `/readyz` is given to everybody: its check is a write, and asking needs no
# key.
FRESH_S = 1.0
# How long a check is waited for, e.g. behind another writer.
PATIENCE_S = 5.0
# The smallest write that needs room on the disk and a database that takes writes.
WRITE = sa.text("update alembic_version set version_num = version_num")

logger = logging.getLogger(__name__)


def alive(parts: Parts) -> Callable[[Request], Awaitable[Response]]:
    """Answers `/healthz`."""
    able = capabilities(parts)

    async def answer(_request: Request) -> Response:
        return json_response(200, {"status": "ok", "capabilities": able})

    return answer


class Ready:
    """Answers `/readyz` from a check that runs at most once a second, however many ask."""

    def __init__(self, parts: Parts) -> None:
        """Nothing was checked yet."""
        self._parts = parts
        self._checked_at = -FRESH_S
        self._checking: asyncio.Task[bool] | None = None
        self._is_ready = True

    async def answer(self, request: Request) -> Response:
        """200, or 503 with the reason."""
        if self._parts.drain.has_begun:
            return error_response(
                request, InternalError("the service is shutting down", status=503)
            )
        if not await self._can_write():
            error = InternalError("the database takes no writes", status=503, retry_after=2)
            return error_response(request, error)
        return json_response(200, {"status": "ok"})

    async def _can_write(self) -> bool:
        if self._checking is None or self._checking.done():
            if time.monotonic() - self._checked_at < FRESH_S:
                return self._is_ready
            self._checking = asyncio.create_task(self._check())
        checking = self._checking
        await asyncio.wait({checking}, timeout=PATIENCE_S)
        return checking.done() and not checking.cancelled() and checking.result()

    async def _check(self) -> bool:
        was_ready = self._is_ready
        try:
            await self._parts.threads.health.run("", self._write)
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

    def _write(self) -> None:
        with self._parts.database.write(clears=False) as connection:
            connection.execute(WRITE)
