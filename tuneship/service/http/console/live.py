"""Keeps an open page as it is in the service: one stream of server-sent events for each page.

A look follows every write of this process or, in a cluster, of another member, at most once a second, and one comes
every few seconds for what is written beside. The whole content is sent when it has changed; the browser puts in place
what differs.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request
from starlette.responses import Response

from tuneship.contract.errors import (
    ApiError,
    AuthenticationError,
    ModelNotFound,
    PermissionDenied,
    ResourceNotFound,
)
from tuneship.service.answers.streaming import Frame as StreamFrame
from tuneship.service.answers.streaming import Stream
from tuneship.service.console.page import page_at
from tuneship.service.console.rendering import gone_page, live_part
from tuneship.service.context.context import Context
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.console.entry import END_SEEN_WITHIN_S, own_path, session_of
from tuneship.service.http.console.visits import Visits, query_of
from tuneship.service.http.streams import StreamResponse

LOOK_EVERY_S = 1.0
# Without any write that wakes it: metrics are stored beside.
LOOK_AT_LEAST_EVERY_S = 5.0


class Live:
    """The streams of open pages."""

    def __init__(self, boundary: Boundary, visits: Visits) -> None:
        self._boundary, self._visits = boundary, visits

    async def answer(self, request: Request) -> Response:
        """Stream the content of the page at the address in the query. Raises `ApiError` for a page that is none."""
        parts, principal = self._boundary.parts, request.state.principal
        address = own_path(request.query_params.get("page", ""))
        page_at(urlsplit(address).path)
        session = request.state.session
        if request.query_params.get("session", session.mark) != session.mark:
            # The page is of an earlier session of this browser.
            raise AuthenticationError("the session of the page has ended")
        context = Context(parts, principal.client_id, request.state.request_id)
        keys = self._boundary.keys

        async def key_end() -> ApiError:
            await keys.wait_until_ended(principal.key_id)
            return AuthenticationError("the key of the session has ended")

        slot = self._boundary.slots.pages.slot(principal.client_id)
        stream = Stream(self._frames(request, address), is_events_only=True)
        return StreamResponse(context, stream, slot, key_end)

    async def _frames(
        self, request: Request, address: str
    ) -> AsyncGenerator[Sequence[StreamFrame]]:
        parts, loop, changed = self._boundary.parts, asyncio.get_running_loop(), asyncio.Event()
        sent: str | None = None
        known: set[Any] = set()
        memory: dict[Any, Any] = {}

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        with parts.database.listening(wake):
            while True:
                changed.clear()
                next_at = loop.time() + LOOK_AT_LEAST_EVERY_S
                try:
                    found = await self._content(request, address, known, memory)
                except AuthenticationError:
                    yield [StreamFrame("end", "signed out")]
                    return
                except (PermissionDenied, ResourceNotFound, ModelNotFound) as error:
                    # What the page was about is gone, or this person may not see it any more.
                    page, _ = page_at(urlsplit(address).path)
                    text = gone_page(error, page, self._visits.frame(request, page), is_live=True)
                    yield [StreamFrame("gone", text)]
                    return
                except ApiError:
                    # The database is away for a moment, or too much is asked: the next look may succeed.
                    found = sent
                if found is not None and found != sent:
                    yield [StreamFrame("main", found)]
                    sent = found
                await asyncio.sleep(LOOK_EVERY_S)
                try:
                    await self._wait(request, changed, next_at)
                except AuthenticationError:
                    yield [StreamFrame("end", "signed out")]
                    return

    async def _wait(self, request: Request, changed: asyncio.Event, until: float) -> None:
        """Wait for a write, or for this time of the loop. Raises `AuthenticationError` where the session ends first."""
        loop = asyncio.get_running_loop()
        while not changed.is_set() and (left := until - loop.time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, END_SEEN_WITHIN_S)):
                    await changed.wait()
                    return
            try:
                await session_of(self._boundary, request, is_use=False)
            except AuthenticationError:
                raise
            except ApiError:
                # The database is away for a moment.
                continue

    async def _content(
        self, request: Request, address: str, known: set[Any], memory: dict[Any, Any]
    ) -> str:
        request.state.session = await session_of(self._boundary, request, is_use=False)
        parts, split = self._boundary.parts, urlsplit(address)
        page, named = page_at(split.path)
        client = self._visits.client(request, known, memory)
        view = await page.view(client, named, query_of(parse_qsl(split.query)))
        frame = self._visits.frame(request, page, address)
        client_id = request.state.principal.client_id
        return await parts.threads.pages.run(client_id, live_part, page, view, frame)
