"""Answers pages and their forms: makes the client of a visit, and HTML of what a page shows."""

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar, cast, get_args
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tuneship.contract.common import DecisionReason
from tuneship.contract.declaring.operation import Operation
from tuneship.contract.errors import (
    ApiError,
    InvalidRequestError,
    ModelNotFound,
    PermissionDenied,
    ResourceNotFound,
)
from tuneship.service.answers.field_errors import error_from_pydantic, field_error
from tuneship.service.console.actions import ACTIONS, Action
from tuneship.service.console.installation_facts import InstallationFacts
from tuneship.service.console.page import ConsolePage, page_at
from tuneship.service.console.page_client import PageClient, Visit
from tuneship.service.console.rendering import PageFrame, gone_page, own_page, whole_page
from tuneship.service.console.subjects import SUBJECTS
from tuneship.service.context.arguments import validated
from tuneship.service.context.bindings import SERVED
from tuneship.service.context.context import Context
from tuneship.service.context.operation_calls import Arguments, OperationCalls
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.console.assets import assets
from tuneship.service.http.console.entry import address_in, check_token, form_of, html, own_path
from tuneship.service.http.contexts import context_of
from tuneship.service.http.disconnect import wait_for_disconnect
from tuneship.service.http.request_content import content_of
from tuneship.settings import ConsoleSettings, LimitSettings, ServiceSettings
from tuneship.store.records.idempotency import Key

S = TypeVar("S", LimitSettings, ConsoleSettings)

# How long a form waits for the answer to an earlier copy of it.
PATIENCE_S, LOOKS_EVERY_S = 10.0, 0.1
# As `ask` makes them.
SHAPE_OF_KEYS = re.compile(r"[0-9a-f]{32}")
# Fields of every form, beside those of its operation.
ABOUT_THE_FORM = ("then", "back", "idempotency_key", "if_match")
# A field of an object in a list.
IN_LIST = re.compile(r"([a-z_]+)\[([0-9])\]\.([a-z_]+)")


class Visits:
    """The pages of the signed-in."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        parts = boundary.parts
        self._installation = InstallationFacts(
            version=version("tuneship"),
            database="SQLite" if parts.database.is_sqlite else "PostgreSQL",
            is_in_cluster=parts.settings.cluster is not None,
            safeguards=parts.capabilities.able,
            missing_for_hipaa=parts.capabilities.missing_for_hipaa,
            limits=_group(LimitSettings, parts.settings),
            console=_group(ConsoleSettings, parts.settings),
            has_openai=parts.settings.openai,
            allows_drills=parts.settings.allow_fault_injection,
        )
        self._calls = {
            name: OperationCalls(bound, boundary.keys, boundary.slots)
            for name, bound in SERVED.items()
        }

    def client(
        self,
        request: Request,
        known: set[Any] | None = None,
        memory: dict[Any, Any] | None = None,
        if_match: str | None = None,
    ) -> PageClient:
        """The client of whoever makes the request.

        `known` and `memory` are those of a stream's looks so far; `if_match` is the version that a change is meant for.
        """

        def make_context(operation: Operation[..., Any], identifier: str | None) -> Context:
            context = context_of(self._boundary, operation, request, identifier)
            context.if_match = if_match
            return context

        return PageClient(
            Visit(
                session=request.state.session,
                calls=self._calls,
                make_context=make_context,
                departure=partial(wait_for_disconnect, request.receive),
                installation=self._installation,
                known=known,
                memory={} if memory is None else memory,
            )
        )

    def frame(
        self, request: Request, page: ConsolePage | None = None, address: str = "", **form: Any
    ) -> PageFrame:
        """The surroundings of a page, and of one whose form was refused."""
        return PageFrame(
            assets().folder,
            self._boundary.parts.clock(),
            getattr(request.state, "session", None),
            page,
            address,
            **form,
        )

    async def show(self, request: Request) -> Response:
        """Answer a page."""
        return await self._page(request, address_in(request))

    async def _page(
        self, request: Request, address: str, status: int = 200, **form: Any
    ) -> Response:
        split = urlsplit(address)
        page, named = page_at(split.path)
        query = query_of(parse_qsl(split.query, keep_blank_values=True))
        try:
            view = await page.view(self.client(request), named, query)
        except (ResourceNotFound, ModelNotFound) as error:
            text = gone_page(error, page, self.frame(request, page), is_live=False)
            return html(request, text, error.status)
        frame = self.frame(request, page, address, **form)
        threads = self._boundary.parts.threads.pages
        client_id = request.state.principal.client_id
        return html(request, await threads.run(client_id, whole_page, page, view, frame), status)

    async def ask(self, request: Request) -> Response:
        """Ask before an action that deletes or ends something, on a page that names what will happen."""
        action, operation = _action(request)
        fields = query_of(request.query_params.multi_items())
        if operation.scope not in request.state.principal.scopes:
            raise PermissionDenied(f"this key lacks the scope {operation.scope}")
        known = {"then", "back", *operation.path_parameters, *action.given}
        if {*fields} - known:
            raise InvalidRequestError("the question has a field that it does not take")
        return await self._question(request, fields)

    async def _question(
        self,
        request: Request,
        sent: Mapping[str, str],
        problem: ApiError | None = None,
    ) -> Response:
        action, operation = _action(request)
        about = (*operation.path_parameters, *action.given)
        fields = {one: sent[one] for one in about if one in sent}
        for name in operation.path_parameters:
            if name not in fields:
                raise field_error(name, "is missing", "missing_field")
        # What a person has filled in stands in the form again.
        given = {one: sent[one] for one in action.asks if one in sent}
        then = own_path(sent.get("then", ""))
        back = own_path(sent.get("back", "") or then)
        called, subject = request.path_params["operation"], None
        if called in SUBJECTS:
            subject = await SUBJECTS[called](self.client(request), fields)
        # Where a sign-in leads after the end of the session; the answer to a form has no address.
        address = address_in(request) if request.method == "GET" else back
        text = own_page(
            "ask.html",
            self.frame(request, address=address, given=given, problem=problem),
            action=action,
            called=called,
            fields=fields,
            subject=subject,
            reasons=get_args(DecisionReason),
            then=then,
            path=back,
        )
        return html(request, text, 200 if problem is None else problem.status)

    async def act(self, request: Request) -> Response:
        """Carry out an action and lead back to a page; a refusal is shown."""
        action, operation = _action(request)
        sent: dict[str, str] = {}
        try:
            if operation.is_form:
                reply = await self._carry_out_with_file(request, operation, sent)
            else:
                sent |= await form_of(request)
                check_token(request.state.session, sent)
                reply = await self._carry_out(request, operation, sent)
        except ApiError as error:
            is_gone = error.status == 404 and operation.method == "DELETE"
            if (is_gone or _is_busy(error)) and "then" in sent:
                # A double click, or another person's: what should be gone is gone, and what is made will be there.
                return RedirectResponse(own_path(sent["then"]), 303)
            is_known = bool(sent.get("back")) or action.question is not None
            if not sent or not is_known or error.status in (401, 403) or error.status >= 500:
                raise
            if action.question is not None:
                return await self._question(request, sent, error)
            # The form again, with what was sent.
            back = own_path(sent["back"])
            return await self._page(request, back, error.status, given=sent, problem=error)
        if action.is_shown:
            back = own_path(sent.get("back", ""))
            return await self._page(request, back, given=sent, reply=reply)
        then = own_path(sent.get("then", ""))
        return RedirectResponse(f"{then}/{reply.id}" if operation.is_creating else then, 303)

    async def _carry_out(
        self, request: Request, operation: Operation[..., Any], sent: Mapping[str, str]
    ) -> Any:
        action, _ = _action(request)
        # What a person left empty is not sent.
        fields = {
            one: text
            for one, text in sent.items()
            if one not in ABOUT_THE_FORM and (text or one not in action.asks)
        }
        fields |= action.sets
        text = f"{operation.name}\n{sorted(fields.items())}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        key, patience_ends = _key(request, operation, sent, digest), time.monotonic() + PATIENCE_S
        while True:
            client = self.client(request, if_match=sent.get("if_match") or None)
            try:
                return await client.carry_out(operation, _arguments(operation, fields), key)
            except ApiError as error:
                # Of a double click a browser shows the second answer, which has to be that of the first.
                if not _is_busy(error) or time.monotonic() > patience_ends:
                    raise
            await asyncio.sleep(LOOKS_EVERY_S)

    async def _carry_out_with_file(
        self, request: Request, operation: Operation[..., Any], sent: dict[str, str]
    ) -> Any:
        action, _ = _action(request)

        @asynccontextmanager
        async def read(context: Context) -> AsyncGenerator[Arguments]:
            async with content_of(operation, request, context) as content:
                fields = dict(content.fields)
                check_token(request.state.session, fields)
                sent.update(fields)
                own = {
                    one: text
                    for one, text in fields.items()
                    if text and one not in (*ABOUT_THE_FORM, *action.leaves_out)
                }
                name, model = operation.body_parameter or ("", BaseModel)
                values = {name: validated(model, own), operation.file_parameter or "": content.file}
                text = f"{sorted(own.items())}\n{content.file and content.file.content_sha256}"
                digest = hashlib.sha256(f"{operation.name}\n{text}".encode()).hexdigest()
                yield Arguments(values, _key(request, operation, fields, digest), content.no_room)

        return await self.client(request).carry_out_read(operation, None, read)


def _is_busy(error: ApiError) -> bool:
    """Whether a request with the same key is still being worked on."""
    return error.status == 409 and error.retryable


def _key(
    request: Request, operation: Operation[..., Any], sent: Mapping[str, str], digest: str
) -> Key | None:
    """The key that makes one request of a double click."""
    name = sent.get("idempotency_key", "")
    if not operation.takes_idempotency_key or not SHAPE_OF_KEYS.fullmatch(name):
        return None
    # Whoever goes back and changes the form means another request.
    return Key(request.state.principal.client_id, f"console:{name}:{digest}", digest, None)


def _group(kind: type[S], settings: ServiceSettings) -> S:
    # A copy of these alone: what a template gets it may show.
    return kind.model_construct(**settings.model_dump(include={*kind.model_fields}))


def query_of(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The parameters of a page's address; a filter that was left empty is none. Raises `InvalidRequestError`."""
    given = {name: value for name, value in pairs if value != ""}
    if len({name for name, _ in pairs}) < len(pairs):
        raise InvalidRequestError("the address has a parameter twice")
    return given


def _action(request: Request) -> tuple[Action, Operation[..., Any]]:
    name = request.path_params["operation"]
    if name not in ACTIONS:
        raise ResourceNotFound("there is no such action")
    return ACTIONS[name], SERVED[ACTIONS[name].operation or name].operation


def _arguments(operation: Operation[..., Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of an operation from the texts of a form. Raises `ApiError`, with the place."""
    values: dict[str, Any] = dict(fields)
    for name in operation.path_parameters:
        if name not in values:
            raise field_error(name, "is missing", "missing_field")
    if operation.body_parameter is not None:
        name, model = operation.body_parameter
        known = {*operation.path_parameters, *operation.query_model.model_fields}
        body = {one: values.pop(one) for one in [*values] if one not in known}
        # What was left empty is not sent.
        values[name] = _body(model, {one: text for one, text in body.items() if text != ""})
    return values


def _body(model: type[BaseModel], fields: Mapping[str, Any]) -> BaseModel:
    try:
        return model.model_validate_strings(_nested(fields), strict=False)
    except ValidationError as error:
        raise error_from_pydantic(error) from None


def _nested(fields: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a form as an object: `a.b` is in `a`, `a[]` is texts with commas, `a[0].b` is of a list of objects.

    An empty field is absent. Raises `InvalidRequestError` for a field that is given in two ways.
    """
    body: dict[str, Any] = {}
    for name, text in fields.items():
        if text == "":
            continue
        if (place := IN_LIST.fullmatch(name)) is not None:
            members = body.setdefault(place[1], [])
            if not isinstance(members, list):
                raise InvalidRequestError("a field of the form is given in two ways")
            listed = cast("list[dict[str, str]]", members)
            listed += [{} for _ in range(len(listed), int(place[2]) + 1)]
            listed[int(place[2])][place[3]] = text
            continue
        group, dot, inner = name.removesuffix("[]").partition(".")
        value = [one.strip() for one in text.split(",")] if name.endswith("[]") else text
        members = body.setdefault(group, {} if dot else value)
        if not (isinstance(members, dict) if dot else members is value):
            raise InvalidRequestError("a field of the form is given in two ways")
        if dot:
            members[inner] = value
    return body
