"""Signs people in, by a link, by their key or by OpenID Connect, and out."""

import asyncio
from contextlib import suppress
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from tuneship.contract.errors import ApiError, AuthenticationError
from tuneship.service.access.console_sessions import Session, SignInOrigin
from tuneship.service.access.open_id import OpenId
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
# What `ended` in the address of the page is after a form that came without its session.
UNSENT = "unsent"
LONGEST_NAME = 64


class SignIn:
    """The page for those who are not signed in, and what its forms do."""

    def __init__(self, boundary: Boundary, open_id: OpenId | None) -> None:
        self._boundary, self._open_id = boundary, open_id

    async def show(self, request: Request) -> Response:
        """The page; a link's code is in its fragment, which the browser keeps for itself."""
        check_way(self._boundary, request)
        session, sessions = None, self._boundary.parts.sessions
        has_cookie = cookie_name(sessions, request) in request.cookies
        with suppress(AuthenticationError):
            session = await session_of(self._boundary, request, is_use=False)
        has_ended = has_cookie and session is None
        then = own_path(request.query_params.get("next", ""))
        response = self.page(request, then, session=session, has_ended=has_ended)
        if has_ended:
            # A change of the cookie also keeps browsers from bringing back a page that they have kept.
            set_cookie(sessions, request, response, "")
        return response

    def page(
        self,
        request: Request,
        then: str,
        problem: ApiError | None = None,
        session: Session | None = None,
        *,
        has_ended: bool = False,
    ) -> Response:
        """The page for those who are not signed in, with what is wrong."""
        frame = PageFrame(assets().folder, self._boundary.parts.clock(), session)
        values = {
            "then": then,
            "problem": problem,
            "has_ended": has_ended,
            "is_unsent": request.query_params.get("ended") == UNSENT,
            "has_open_id": self._open_id is not None,
        }
        text = own_page("sign-in.html", frame, **values)
        return html(request, text, 200 if problem is None else problem.status)

    async def sign_in(self, request: Request) -> Response:
        """Begin a session and lead to the page that was asked for. A GET of a link changes nothing."""
        check_way(self._boundary, request)
        check_origin(request)
        fields = await form_of(request)
        then, sessions = own_path(fields.get("next", "")), self._boundary.parts.sessions
        origin = self.origin(request)
        if (code := fields.get("code", "").strip()) != "":
            # Somebody who copies a link copies all of it.
            begin = partial(sessions.sign_in_by_link, code.rpartition("#")[2], origin)
        else:
            name = "".join(one for one in fields.get("name", "") if one.isprintable())
            person = name.strip()[:LONGEST_NAME], fields.get("looks_only") == "yes"
            key, client_id = fields.get("key", "").strip(), fields.get("client_id", "").strip()
            begin = partial(sessions.sign_in_by_key, key, client_id, person, origin)
        self._boundary.limits.count_sign_in(remote_source(request)).check()
        try:
            cookie = await asyncio.to_thread(begin)
        except AuthenticationError as error:
            return await self.refusal(request, then, error)
        return await self.begun(request, RedirectResponse(then, 303), cookie)

    def origin(self, request: Request) -> SignInOrigin:
        """The origin of a request to sign in."""
        is_here = is_local(self._boundary, request)
        return SignInOrigin(address_of(request), request.state.request_id, is_here)

    async def refusal(self, request: Request, then: str, error: ApiError) -> Response:
        """The page for a sign-in that failed, which is counted and recorded."""
        # Only failures are limited: behind an address may be a whole hospital, with one stale program.
        limits = self._boundary.limits
        limits.count_failure(remote_source(request))
        if limits.count_audited_failure():
            await asyncio.to_thread(record_failure, self._boundary, request)
        return self.page(request, then, error)

    async def begun(self, request: Request, response: Response, cookie: str) -> Response:
        """The answer with which a session begins; the one that the browser had before ends."""
        sessions = self._boundary.parts.sessions
        before = request.cookies.get(cookie_name(sessions, request))
        if before is not None:
            await asyncio.to_thread(sessions.end, before, self.origin(request))
        set_cookie(sessions, request, response, cookie)
        return response

    def onward(self, request: Request, address: str) -> Response:
        """A page from which the browser goes on by itself.

        Coming from another site it would leave the strict cookie at home, and a form must not lead to another site.
        """
        frame = PageFrame(assets().folder, self._boundary.parts.clock())
        return html(request, own_page("onward.html", frame, then=address))

    async def sign_out(self, request: Request) -> Response:
        """End the session."""
        check_token(request.state.session, await form_of(request))
        sessions = self._boundary.parts.sessions
        cookie = request.cookies[cookie_name(sessions, request)]
        await asyncio.to_thread(sessions.end, cookie, self.origin(request))
        response: Response = RedirectResponse(SIGN_IN, 303)
        if self._open_id is not None and request.state.principal.person is not None:
            # Else the provider would let the next one at this browser in without a question.
            address = await self._open_id.end_address(self._boundary.parts.public_url + SIGN_IN)
            response = response if address is None else self.onward(request, address)
        set_cookie(sessions, request, response, "")
        return response

    async def time_left(self, request: Request) -> Response:
        """Answer which session it is, and in how many seconds it ends, unused and in any case."""
        session, now = request.state.session, self._boundary.parts.clock()
        left = {
            "idle": (session.idle_ends_at - now).total_seconds(),
            "whole": (session.ends_at - now).total_seconds(),
            "session": session.mark,
        }
        return JSONResponse(left, headers={"Cache-Control": "no-store"})

    async def stay(self, request: Request) -> Response:
        """The same, for somebody who pressed a key: the request itself was noted as a use."""
        check_token(request.state.session, await form_of(request))
        # At once, so that the other members of a cluster know it, too.
        await asyncio.to_thread(self._boundary.parts.sessions.store_uses)
        return await self.time_left(request)


def remote_source(request: Request) -> str:
    """The address by which sign-ins are limited."""
    return source_of(request.client.host if request.client else "")
