"""Signs people in by OpenID Connect: leads to the provider, and takes what it answers.

A sealed cookie keeps the secrets of a sign-in, so that any member of a cluster can finish it. Each sign-in has a cookie
of its own, so that two tabs of a browser can begin one at the same time.
"""

import asyncio
import base64
import hashlib
import hmac
import json
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tuneship.contract.errors import (
    ApiError,
    AuthenticationError,
    PermissionDenied,
    ResourceNotFound,
)
from tuneship.security.vault import SealBroken
from tuneship.service.access.open_id import BegunSignIn, OpenId
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.console.entry import PREFIX, check_way, cookie_name, own_path
from tuneship.service.http.console.sign_in import SIGN_IN, SignIn, remote_source

# The first leads to the provider, which leads back to the second.
OPEN_ID, OPEN_ID_END = f"{SIGN_IN}/openid", f"{SIGN_IN}/openid/end"
WITHIN_S = 600
# The most sign-ins that a browser may have begun. A proxy may have room for 8 KiB of cookies.
MOST_BEGUN = 4
LONGEST_NEXT = 512
ABOUT_COOKIE = "sign-in by OpenID Connect"


def open_id_of(boundary: Boundary) -> OpenId | None:
    """The provider of the settings; None without one. Raises `StartupError`."""
    parts = boundary.parts
    if not parts.settings.oidc_issuer:
        return None
    return OpenId(parts.settings, parts.public_url + OPEN_ID_END, parts.clock)


class OpenIdSignIn:
    """The way to the provider and back."""

    def __init__(self, boundary: Boundary, open_id: OpenId | None, sign_in: SignIn) -> None:
        self._boundary, self._open_id, self._sign_in = boundary, open_id, sign_in

    async def begin(self, request: Request) -> Response:
        """Lead to the provider."""
        check_way(self._boundary, request)
        then = own_path(request.query_params.get("next", ""))
        try:
            address, begun = await self._provider().begin()
        except ApiError as error:
            return self._sign_in.page(request, then, error)
        kept = {
            "begun": asdict(begun),
            "then": then if len(then) <= LONGEST_NEXT else PREFIX,
            "until": self._boundary.parts.clock().timestamp() + WITHIN_S,
        }
        sealed = self._boundary.parts.vault.seal(json.dumps(kept).encode(), ABOUT_COOKIE)
        response = RedirectResponse(address, 303)
        before = [one for one in request.cookies if one.startswith(f"{self._prefix(request)}-")]
        # Browsers send the oldest cookie first.
        for name in before[: 1 - MOST_BEGUN]:
            self._keep(request, response, name, "")
        name = self._cookie(request, begun.state)
        self._keep(request, response, name, base64.urlsafe_b64encode(sealed).decode())
        return response

    async def end(self, request: Request) -> Response:
        """Begin a session of the person whom the provider names."""
        check_way(self._boundary, request)
        self._boundary.limits.count_sign_in(remote_source(request)).check()
        name = self._cookie(request, request.query_params.get("state", ""))
        kept = self._kept(request, name)
        begun, then = (None, PREFIX) if kept is None else kept
        try:
            response = await self._answered(request, begun, then)
        except AuthenticationError as error:
            response = await self._sign_in.refusal(request, then, error)
        except ApiError as error:
            response = self._sign_in.page(request, then, error)
        self._keep(request, response, name, "")
        return response

    async def _answered(self, request: Request, begun: BegunSignIn | None, then: str) -> Response:
        query, sessions = request.query_params, self._boundary.parts.sessions
        state = query.get("state", "").encode()
        if begun is None or not hmac.compare_digest(state, begun.state.encode()):
            text = "this browser began no such sign-in here in the last ten minutes: begin again"
            raise AuthenticationError(text)
        if "code" not in query:
            raise AuthenticationError("the provider of OpenID Connect let nobody in")
        person, rights = await self._provider().finish(query["code"], begun)
        origin = self._sign_in.origin(request)
        if rights is None:
            await asyncio.to_thread(sessions.refuse_person, person, origin)
            raise PermissionDenied("none of your groups may use this service: ask whoever runs it")
        given = person, rights.client_id, rights.scopes, origin
        cookie = await asyncio.to_thread(sessions.sign_in_person, *given)
        return await self._sign_in.begun(request, self._sign_in.onward(request, then), cookie)

    def _provider(self) -> OpenId:
        if self._open_id is None:
            raise ResourceNotFound("this installation has no sign-in by OpenID Connect")
        return self._open_id

    def _prefix(self, request: Request) -> str:
        # Not named like that of a session, which tells whether a visit came from another site.
        return cookie_name(self._boundary.parts.sessions, request).replace("tuneship", "openid")

    def _cookie(self, request: Request, state: str) -> str:
        """The name of the cookie of one sign-in, which does not give its state away."""
        return f"{self._prefix(request)}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"

    def _keep(self, request: Request, response: Response, name: str, value: str) -> None:
        """Keep the secrets of a sign-in in the browser, or take them away with an empty value."""
        response.set_cookie(
            name,
            value,
            max_age=WITHIN_S if value else 0,
            path="/",
            secure=request.scope["scheme"] == "https",
            httponly=True,
            # A strict cookie would not come along when the provider leads back.
            samesite="lax",
        )

    def _kept(self, request: Request, name: str) -> tuple[BegunSignIn, str] | None:
        """The secrets of the sign-in that the browser began, and where that leads; None without one."""
        parts = self._boundary.parts
        try:
            sealed = base64.urlsafe_b64decode(request.cookies.get(name, ""))
            kept = json.loads(parts.vault.open(sealed, ABOUT_COOKIE))
        except (ValueError, SealBroken):
            return None
        is_late = kept["until"] <= parts.clock().timestamp()
        return None if is_late else (BegunSignIn(**kept["begun"]), kept["then"])
