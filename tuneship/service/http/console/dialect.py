"""The console as a dialect: pages below `/console` for a session instead of a key."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tuneship.contract.errors import ApiError, ResourceNotFound
from tuneship.contract.generation import generate
from tuneship.service.console.page import all_pages
from tuneship.service.console.rendering import PageFrame, error_page
from tuneship.service.context.bindings import SERVED
from tuneship.service.http.app import OperationEndpoint
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.console.assets import answer_asset, assets
from tuneship.service.http.console.entry import (
    GENERATE,
    LIVE,
    PREFIX,
    SESSION,
    FormOfAnotherSession,
    address_in,
    answer_headers,
    authenticate,
    check_token,
    html,
    own_path,
    page_of_form,
    session_end,
)
from tuneship.service.http.console.live import Live
from tuneship.service.http.console.open_id_sign_in import (
    OPEN_ID,
    OPEN_ID_END,
    OpenIdSignIn,
    open_id_of,
)
from tuneship.service.http.console.sign_in import SIGN_IN, SIGN_OUT, UNSENT, SignIn
from tuneship.service.http.console.visits import Visits
from tuneship.service.http.dialect import Dialect, json_response
from tuneship.service.http.responses import error_response
from tuneship.service.http.routes import route

# A page from which a browser comes again to the same address, this time with its cookie: it leaves a strict cookie at
# home when a link of another site led here.
AGAIN = (
    '<!doctype html><html lang="en"><title>tuneship</title><meta http-equiv="refresh" content="0">'
)
# The stream of an open page whose session has ended. A browser gives up for good at any status but 200.
SIGNED_OUT = "event: end\ndata: signed out\n\n"
Answer = Callable[[Request], Awaitable[Response]]


def _routes(boundary: Boundary) -> Sequence[Route]:
    visits, open_id = Visits(boundary), open_id_of(boundary)
    sign_in = SignIn(boundary, open_id)
    by_open_id = OpenIdSignIn(boundary, open_id, sign_in)
    live = Live(boundary, visits)
    generating = OperationEndpoint(boundary, SERVED[generate.name], partial(session_end, boundary))

    async def generated(request: Request) -> Response:
        # The script of the page sends no form, but the operation's own body.
        token = request.headers.get("x-form-token", "")
        check_token(request.state.session, {"form_token": token})
        return await generating.answer(request)

    return (
        *(route("GET", path, answer_asset) for path in assets().by_path),
        route("GET", SIGN_IN, _safe(sign_in.show)),
        route("POST", SIGN_IN, _safe(sign_in.sign_in)),
        route("GET", OPEN_ID, _safe(by_open_id.begin)),
        route("GET", OPEN_ID_END, _safe(by_open_id.end)),
        route("POST", SIGN_OUT, _safe(sign_in.sign_out)),
        route("GET", SESSION, _safe(sign_in.time_left)),
        route("POST", SESSION, _safe(sign_in.stay)),
        route("GET", LIVE, _safe(live.answer)),
        route("POST", f"{GENERATE}{{deployment_id}}", _safe(generated)),
        route("GET", f"{PREFIX}/do/{{operation}}", _safe(visits.ask)),
        route("POST", f"{PREFIX}/do/{{operation}}", _safe(visits.act)),
        route("GET", PREFIX, _safe(visits.show)),
        route("GET", f"{PREFIX}/{{rest:path}}", _safe(visits.show)),
    )


def _safe(answer: Answer) -> Answer:
    """Answer an exception as a page."""

    async def answered(request: Request) -> Response:
        try:
            return await answer(request)
        except Exception as error:  # noqa: BLE001 - the last line of defence: it logs and answers
            return error_response(request, error)

    return answered


def _error_answer(request: Request, error: ApiError, request_id: str) -> Response:
    path = request.scope["path"]
    if path.startswith(GENERATE):
        return json_response(error.status, error.as_json(request_id))
    is_get, from_page = request.method == "GET", page_of_form(request)
    # The session of the page has ended, and perhaps another one has begun in the same browser.
    has_ended = error.status == 401 or (isinstance(error, FormOfAnotherSession) and from_page != "")
    if not has_ended:
        session = getattr(request.state, "session", None)
        # A question about something that is gone names the page to go on with.
        onward = own_path(request.query_params.get("then", ""))
        frame = PageFrame(assets().folder, datetime.now(UTC), session, address=onward)
        return html(request, error_page(error, request_id, frame), error.status)
    if path == LIVE:
        return Response(SIGNED_OUT, media_type="text/event-stream")
    is_ours = any("tuneship-" in name for name in request.cookies)
    if request.headers.get("sec-fetch-site") == "cross-site" and not is_ours:
        return HTMLResponse(AGAIN, headers={"Cache-Control": "no-store"})
    if path == SIGN_OUT:
        return RedirectResponse(SIGN_IN, 303)
    query = {} if is_get else {"ended": UNSENT}
    if then := address_in(request) if is_get else from_page:
        query["next"] = then
    # As the script writes it that leads there when a session ends.
    text = urlencode(query, quote_via=quote, safe="")
    return RedirectResponse(SIGN_IN + (f"?{text}" if text else ""), 303)


def console() -> Dialect:
    """The dialect, with its scripts and pages loaded: a page that is declared wrongly fails at the start."""
    all_pages()
    return Dialect(
        prefix=PREFIX,
        authenticate=authenticate,
        routes=_routes,
        open_paths=frozenset({SIGN_IN, OPEN_ID, OPEN_ID_END, *assets().by_path}),
        answer_headers=answer_headers,
        error_answer=_error_answer,
        unknown_route=lambda: ResourceNotFound("there is no such page"),
    )
