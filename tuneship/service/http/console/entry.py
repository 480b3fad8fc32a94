"""Lets a browser in: the address it called, the way it came, its session, and that its form is ours.

The cookie is `SameSite=Strict`, but another port of the same host is the same site. So every form needs
`Sec-Fetch-Site: same-origin` and the session's token.
"""

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from tuneship.contract.errors import (
    ApiError,
    AuthenticationError,
    InvalidRequestError,
    PermissionDenied,
)
from tuneship.service.access.api_keys import Principal
from tuneship.service.access.console_sessions import ConsoleSessions, Session
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.contexts import is_private
from tuneship.service.http.forms import check_length, limited
from tuneship.service.http.forwarding import plain_address

PREFIX = "/console"
LIVE = f"{PREFIX}/live"
SESSION = f"{PREFIX}/session"
# Below it are the deployments that answer the playground.
GENERATE = f"{PREFIX}/generate/"
FORM_BYTES = 64 << 10
FORM_FIELDS = 200
END_SEEN_WITHIN_S = 2.0
FORM_MEDIA = "application/x-www-form-urlencoded"
# The headers of every answer of the console. No script, style or frame of anybody else, and no text as a script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types tuneship"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # Not `no-referrer`, which would make a form's Origin `null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), clipboard-read=(), usb=(), payment=()",
}


def answer_headers(_state: Mapping[str, Any], _started: float) -> Mapping[str, str]:
    """The headers of every answer."""
    return HEADERS


def html(request: Request, text: str, status: int = 200) -> Response:
    """A page. Nobody keeps it, and it is not compressed: it has a secret beside other people's texts."""
    response = HTMLResponse(text, status, headers={"Cache-Control": "no-store"})
    if request.scope["scheme"] == "https":
        response.headers["Strict-Transport-Security"] = "max-age=31536000"
    return response


async def authenticate(boundary: Boundary, request: Request) -> Principal:
    """The principal of the browser's session. Raises `ApiError`."""
    check_way(boundary, request)
    if request.method != "GET":
        check_origin(request)
    path, is_get = request.scope["path"], request.method == "GET"
    # An open page keeps nobody signed in, nor does its question how long the session lasts.
    is_use = path != LIVE and not (path == SESSION and is_get)
    session = await session_of(boundary, request, is_use=is_use)
    boundary.limits.count_page(session.form_token).check()
    if path.startswith(GENERATE):
        window = await boundary.limits.counted(session.principal.client_id, "generate")
        request.state.window = window
    elif not is_get and path != SESSION:
        window = await boundary.limits.counted(session.principal.client_id, "control")
        if window is not None:
            window.check()
    request.state.session = session
    return session.principal


async def session_of(boundary: Boundary, request: Request, *, is_use: bool) -> Session:
    """The browser's session. Raises `AuthenticationError`."""
    sessions = boundary.parts.sessions
    cookie = request.cookies.get(cookie_name(sessions, request))
    if cookie is None:
        raise AuthenticationError("sign in first")
    return await asyncio.to_thread(sessions.find, cookie, is_use=is_use)


async def session_end(boundary: Boundary, request: Request) -> ApiError:
    """Return once the session or its key has ended, with the error for what is still being read."""
    while True:
        await asyncio.sleep(END_SEEN_WITHIN_S)
        try:
            await session_of(boundary, request, is_use=False)
        except AuthenticationError as error:
            return error
        except ApiError:
            # The database is away for a moment.
            continue


def check_way(boundary: Boundary, request: Request) -> None:
    """Refuse a foreign `Host`, by which a page elsewhere could reach this one, and plain HTTP from other machines."""
    host = _host_of(f"//{request.headers.get('host', '')}")
    if host not in {_host_of(boundary.parts.public_url), "localhost"} and not plain_address(host):
        raise InvalidRequestError(
            "the service is not known by this host name (TUNESHIP_PUBLIC_URL)"
        )
    if not (is_private(boundary, request) or boundary.parts.settings.console_plaintext):
        raise PermissionDenied(
            "the console is answered over TLS, or on the service's own machine (docs/console.md)"
        )


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def check_origin(request: Request) -> None:
    """Refuse a form of another page. Raises `PermissionDenied`."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    own = f"{request.scope['scheme']}://{request.headers.get('host', '')}"
    is_own = origin == own if site is None else site == "same-origin"
    if not is_own:
        raise PermissionDenied("the form was sent from another page")


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form. Raises `InvalidRequestError` where one is given twice, or the form is too large."""
    if request.headers.get("content-type", "").partition(";")[0] != FORM_MEDIA:
        raise InvalidRequestError(f"a form must be {FORM_MEDIA}", status=415)
    check_length(request, FORM_BYTES)
    body = b"".join([block async for block in limited(request, FORM_BYTES)])
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, strict_parsing=False, max_num_fields=FORM_FIELDS
        )
    except ValueError:
        raise InvalidRequestError("the form cannot be read") from None
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InvalidRequestError("a field of the form was sent twice")
    return fields


class FormOfAnotherSession(PermissionDenied):
    """A form without the token of the session with which it came."""

    def __init__(self) -> None:
        super().__init__("the form is of another session: open the page again")


def check_token(session: Session, fields: dict[str, str]) -> None:
    """Refuse a form without the session's token, and take the token out. Raises `FormOfAnotherSession`."""
    if not hmac.compare_digest(fields.pop("form_token", "").encode(), session.form_token.encode()):
        raise FormOfAnotherSession


def page_of_form(request: Request) -> str:
    """The address of the page whose form was sent; empty where the browser does not name it."""
    try:
        found = urlsplit(request.headers.get("referer", ""))
    except ValueError:
        return ""
    # The answer to a form that was refused is no page that can be opened again.
    is_answer = found.path.startswith(f"{PREFIX}/do/") and not found.query
    if is_answer or found.netloc != request.headers.get("host"):
        return ""
    return own_path(found.path + (f"?{found.query}" if found.query else ""))


def cookie_name(sessions: ConsoleSessions, request: Request) -> str:
    """The cookie of this installation. Cookies ignore ports, so that two services of a machine need two names."""
    # Browsers take a cookie named so over TLS only, and from this very host only.
    prefix = "__Host-" if request.scope["scheme"] == "https" else ""
    return f"{prefix}tuneship-{sessions.installation}"


def set_cookie(sessions: ConsoleSessions, request: Request, response: Response, value: str) -> None:
    """Put a session's cookie on an answer, or take it away with an empty value."""
    response.set_cookie(
        cookie_name(sessions, request),
        value,
        max_age=None if value else 0,
        path="/",
        secure=request.scope["scheme"] == "https",
        httponly=True,
        samesite="strict",
    )


def address_in(request: Request) -> str:
    """The path that a browser asked for, with its query."""
    query = request.scope["query_string"].decode("ascii", "replace")
    return request.scope["path"] + (f"?{query}" if query else "")


def own_path(text: str) -> str:
    """The address to which a sign-in leads: a page of the console, never another host."""
    is_own = text == PREFIX or text.startswith((f"{PREFIX}/", f"{PREFIX}?"))
    return text if is_own and "\\" not in text and "\n" not in text and "\r" not in text else PREFIX
