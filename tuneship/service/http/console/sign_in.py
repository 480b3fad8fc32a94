"""Signs people in, by a link or by their key, and out."""

import asyncio
from contextlib import suppress
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from tuneship.contract.errors import ApiError, AuthenticationError
from tuneship.service.access.console_sessions import Session, SignInOrigin
from tuneship.service.console.rendering import PageFrame, own_page
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.console.assets import assets
from tuneship.service.http.console.entry import (
    PREFIX,
    check_origin,
    check_token,
    check_way,
    cookie_name,
    form_of,
    html,
    own_path,
    session_of,
    set_cookie,
)
from tuneship.service.http.contexts import address_of, is_local, record_failure
from tuneship.service.http.forwarding import source_of

SIGN_IN, SIGN_OUT = f"{PREFIX}/sign-in", f"{PREFIX}/sign-out"
LONGEST_NAME = 64


class SignIn:
    """The page for those who are not signed in, and what its forms do."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary

    async def show(self, request: Request) -> Response:
        """The page; a link's code is in its fragment, which the browser keeps for itself."""
        check_way(self._boundary, request)
        session, sessions = None, self._boundary.parts.sessions
        has_cookie = cookie_name(sessions, request) in request.cookies
        with suppress(AuthenticationError):
            session = await session_of(self._boundary, request, is_use=False)
        has_ended = has_cookie and session is None
        then = own_path(request.query_params.get("next", ""))
        response = self._page(request, then, session=session, has_ended=has_ended)
        if has_ended:
            # A change of the cookie also keeps browsers from bringing back a page that they have kept.
            set_cookie(sessions, request, response, "")
        return response

    def _page(
        self,
        request: Request,
        then: str,
        problem: ApiError | None = None,
        session: Session | None = None,
        *,
        has_ended: bool = False,
    ) -> Response:
        frame = PageFrame(assets().folder, self._boundary.parts.clock(), session)
        text = own_page("sign-in.html", frame, then=then, problem=problem, has_ended=has_ended)
        return html(request, text, 200 if problem is None else problem.status)

    async def sign_in(self, request: Request) -> Response:
        """Begin a session and lead to the page that was asked for. A GET of a link changes nothing."""
        check_way(self._boundary, request)
        check_origin(request)
        fields = await form_of(request)
        then, sessions = own_path(fields.get("next", "")), self._boundary.parts.sessions
        origin = self._origin(request)
        if (code := fields.get("code", "").strip()) != "":
            # Somebody who copies a link copies all of it.
            begin = partial(sessions.sign_in_by_link, code.rpartition("#")[2], origin)
        else:
            name = "".join(one for one in fields.get("name", "") if one.isprintable())
            person = name.strip()[:LONGEST_NAME], fields.get("looks_only") == "yes"
            key, client_id = fields.get("key", "").strip(), fields.get("client_id", "").strip()
            begin = partial(sessions.sign_in_by_key, key, client_id, person, origin)
        limits = self._boundary.limits
        source = source_of(request.client.host if request.client else "")
        limits.count_sign_in(source).check()
        try:
            cookie = await asyncio.to_thread(begin)
        except AuthenticationError as error:
            # Only failures are limited: behind an address may be a whole hospital, with one stale program.
            limits.count_failure(source)
            if limits.count_audited_failure():
                await asyncio.to_thread(record_failure, self._boundary, request)
            return self._page(request, then, error)
        before = request.cookies.get(cookie_name(sessions, request))
        if before is not None:
            await asyncio.to_thread(sessions.end, before, origin)
        response = RedirectResponse(then, 303)
        set_cookie(sessions, request, response, cookie)
        return response

    async def sign_out(self, request: Request) -> Response:
        """End the session."""
        check_token(request.state.session, await form_of(request))
        sessions = self._boundary.parts.sessions
        cookie = request.cookies[cookie_name(sessions, request)]
        await asyncio.to_thread(sessions.end, cookie, self._origin(request))
        response = RedirectResponse(SIGN_IN, 303)
        set_cookie(sessions, request, response, "")
        return response

    def _origin(self, request: Request) -> SignInOrigin:
        is_here = is_local(self._boundary, request)
        return SignInOrigin(address_of(request), request.state.request_id, is_here)

    async def time_left(self, request: Request) -> Response:
        """Answer in how many seconds the session ends, unused and in any case."""
        session, now = request.state.session, self._boundary.parts.clock()
        left = {
            "idle": (session.idle_ends_at - now).total_seconds(),
            "whole": (session.ends_at - now).total_seconds(),
        }
        return JSONResponse(left, headers={"Cache-Control": "no-store"})

    async def stay(self, request: Request) -> Response:
        """The same, for somebody who pressed a key: the request itself was noted as a use."""
        check_token(request.state.session, await form_of(request))
        # At once, so that the other members of a cluster know it, too.
        await asyncio.to_thread(self._boundary.parts.sessions.store_uses)
        return await self.time_left(request)
