"""Keeps an open page as it is in the service: one stream of server-sent events for each page.

A look follows every write of this process or, in a cluster, of another member: a few at once, and over time one each
second. Every few seconds the page is rendered again, since its words may name a time; it is read again if metrics, logs
or the like have been written meanwhile, and now and then in any case. The whole content is sent when it has changed;
the browser puts in place what differs.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
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
from tuneship.service.console.page import ConsolePage, page_at
from tuneship.service.console.rendering import gone_page, live_part
from tuneship.service.context.context import Context
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.console.entry import END_SEEN_WITHIN_S, own_path, session_of
from tuneship.service.http.console.visits import Visits, query_of
from tuneship.service.http.streams import StreamResponse

# How often a page looks while the service writes all the time, and how many looks may come sooner after a pause.
LOOK_EVERY_S, LOOKS_SOONER = 1.0, 5
# One request may write several times.
WRITES_TOGETHER_S = 0.05
RENDER_EVERY_S = 5.0
# Some figures are in memory alone, and what other members of a cluster write beside is not announced.
READ_AT_LEAST_EVERY_S = 15.0


class LookPace:
    """Decides how soon a look follows a write."""

    def __init__(self) -> None:
        """Let the first looks come at once."""
        self._spent_until = -inf

    def pause(self, now: float) -> float:
        """The seconds from a write at this time to its look."""
        at = max(now + WRITES_TOGETHER_S, self._spent_until - LOOKS_SOONER * LOOK_EVERY_S)
        self._spent_until = max(at, self._spent_until) + LOOK_EVERY_S
        return at - now


@dataclass
class OpenPage:
    """A page that a stream follows, and what it keeps from one look to the next."""

    page: ConsolePage
    named: Mapping[str, str]
    query: Mapping[str, str]
    address: str
    known: set[Any] = field(default_factory=set[Any])
    memory: dict[Any, Any] = field(default_factory=dict[Any, Any])
    view: Any = None
    # Whether something was written since the view was read, and when it is read in any case.
    is_old: bool = True
    read_at_least_at: float = 0.0


class Live:
    """The streams of open pages."""

    def __init__(self, boundary: Boundary, visits: Visits) -> None:
        self._boundary, self._visits = boundary, visits

    async def answer(self, request: Request) -> Response:
        """Stream the content of the page at the address in the query. Raises `ApiError` for a page that is none."""
        parts, principal = self._boundary.parts, request.state.principal
        address = own_path(request.query_params.get("page", ""))
        split = urlsplit(address)
        open_page = OpenPage(*page_at(split.path), query_of(parse_qsl(split.query)), address)
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
        stream = Stream(self._frames(request, open_page), is_events_only=True)
        return StreamResponse(context, stream, slot, key_end)

    async def _frames(
        self, request: Request, open_page: OpenPage
    ) -> AsyncGenerator[Sequence[StreamFrame]]:
        parts, loop, changed = self._boundary.parts, asyncio.get_running_loop(), asyncio.Event()
        sent: str | None = None
        pace = LookPace()

        def wake() -> None:
            open_page.is_old = True
            loop.call_soon_threadsafe(changed.set)

        def note() -> None:
            open_page.is_old = True

        tenant = request.state.principal.client_id
        with parts.database.listening(wake, tenant=tenant, beside=note):
            while True:
                changed.clear()
                next_at = loop.time() + RENDER_EVERY_S
                try:
                    found = await self._content(request, open_page)
                except AuthenticationError:
                    yield [StreamFrame("end", "signed out")]
                    return
                except (PermissionDenied, ResourceNotFound, ModelNotFound) as error:
                    # What the page was about is gone, or this person may not see it any more.
                    page = open_page.page
                    frame = self._visits.frame(request, page)
                    text = gone_page(error, page, frame, is_live=True)
                    yield [StreamFrame("gone", text)]
                    return
                except ApiError:
                    # The database is away for a moment, or too much is asked: the next look may succeed.
                    open_page.is_old, found = True, sent
                if found is not None and found != sent:
                    yield [StreamFrame("main", found)]
                    sent = found
                try:
                    await self._wait(request, changed, next_at)
                except AuthenticationError:
                    yield [StreamFrame("end", "signed out")]
                    return
                if changed.is_set():
                    await asyncio.sleep(pace.pause(loop.time()))

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

    async def _content(self, request: Request, open_page: OpenPage) -> str:
        request.state.session = await session_of(self._boundary, request, is_use=False)
        parts, page = self._boundary.parts, open_page.page
        now = asyncio.get_running_loop().time()
        if open_page.is_old or now >= open_page.read_at_least_at:
            # Before the page is read: what is written meanwhile it may not have.
            open_page.is_old = False
            is_alone = parts.settings.cluster is None
            open_page.read_at_least_at = now + (READ_AT_LEAST_EVERY_S if is_alone else 0.0)
            client = self._visits.client(request, open_page.known, open_page.memory)
            open_page.view = await page.view(client, open_page.named, open_page.query)
        frame = self._visits.frame(request, page, open_page.address)
        client_id = request.state.principal.client_id
        return await parts.threads.pages.run(client_id, live_part, page, open_page.view, frame)
