"""Signs people in, by a link or by their key, and out."""

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tuneship.contract.errors import ApiError, AuthenticationError, RateLimitExceeded
from tuneship.service.access.console_sessions import Place
from tuneship.service.console.rendering import Frame, own_page
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
    set_cookie,
)
from tuneship.service.http.contexts import address_of, is_local
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
        return self._page(request, own_path(request.query_params.get("next", "")))

    def _page(self, request: Request, then: str, problem: ApiError | None = None) -> Response:
        frame = Frame(assets().folder, self._boundary.parts.clock())
        text = own_page("sign-in.html", frame, then=then, problem=problem)
        return html(request, text, 200 if problem is None else problem.status)

    async def sign_in(self, request: Request) -> Response:
        """Begin a session and lead to the page that was asked for. A GET of a link changes nothing."""
        check_way(self._boundary, request)
        check_origin(request)
        fields = await form_of(request)
        then, sessions = own_path(fields.get("next", "")), self._boundary.parts.sessions
        place = Place(
            address_of(request), request.state.request_id, is_local(self._boundary, request)
        )
        if (code := fields.get("code", "").strip()) != "":
            # Somebody who copies a link copies all of it.
            begin = partial(sessions.sign_in_by_link, code.rpartition("#")[2], place)
        else:
            name = "".join(one for one in fields.get("name", "") if one.isprintable())
            person = name.strip()[:LONGEST_NAME], fields.get("looks_only") == "yes"
            key, client_id = fields.get("key", "").strip(), fields.get("client_id", "").strip()
            begin = partial(sessions.sign_in_by_key, key, client_id, person, place)
        limits = self._boundary.limits
        source = source_of(request.client.host if request.client else "")
        if (failures := limits.failures(source)).exceeded:
            problem = RateLimitExceeded(
                "too many failed sign-ins from this address", retry_after=failures.retry_after
            )
            return self._page(request, then, problem)
        try:
            cookie = await asyncio.to_thread(begin)
        except AuthenticationError as error:
            limits.count_failure(source)
            return self._page(request, then, error)
        response = RedirectResponse(then, 303)
        set_cookie(sessions, request, response, cookie)
        return response

    async def sign_out(self, request: Request) -> Response:
        """End the session."""
        check_token(request.state.session, await form_of(request))
        sessions = self._boundary.parts.sessions
        cookie = request.cookies[cookie_name(sessions, request)]
        await asyncio.to_thread(sessions.end, cookie)
        response = RedirectResponse(SIGN_IN, 303)
        set_cookie(sessions, request, response, "")
        return response
