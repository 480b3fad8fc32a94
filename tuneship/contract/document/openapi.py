"""The OpenAPI 3.1 document, made from the declared operations alone: `document()`.

No web framework guesses anything: parameters, bodies, replies and examples are those of the declarations in
`contract/<resource>.py`; errors follow from method, path and body, plus those that an operation names. `tuneship
openapi` prints the document, `/openapi.json` serves it, and `docs/openapi.json` is the snapshot. How models become
schemas: `openapi_schemas.py`.
"""

import re
from collections.abc import Iterable
from typing import Any

from tuneship.contract.declaring.examples import PATH_VALUES, REQUEST
from tuneship.contract.declaring.operation import CREATED, DECLARED, TAR, Operation
from tuneship.contract.declaring.scopes import SCOPES
from tuneship.contract.document.openapi_schemas import (
    Schemas,
    summary_of,
    text_of,
    without_references,
)
from tuneship.contract.errors import BY_CODE, ApiError, ErrorDetail
from tuneship.contract.resources import SECTIONS

Json = dict[str, Any]

DESCRIPTION = """\
Tune language models, serve them, and shift traffic to them safely.

Every request carries `Authorization: Bearer <API key>` and `X-Client-ID`, which names the tenant of the key; a key's
scopes say what it may do. Only `/openapi.json`, `/healthz` (200 while the process lives; lists the safeguards that are
enforced) and `/readyz` (503 while the service shuts down or its database takes no writes) need no key.

**Errors.** An error has one body shape (`Error`) everywhere, unknown routes and methods (405, with `Allow`) included,
and never holds what was sent. 400: the request cannot be read, or a field is missing or unknown. 422: it was read and
refused. 409: it comes at the wrong moment. `X-Should-Retry` says whether the same request may succeed later,
`Retry-After` after how many seconds. The checks come in this order: framing, key, route, rate, scope, size, media type,
syntax, fields, referenced resources, state, quota (that of bytes with the size).

**Values.** Types are strict: `"3"`, `3.0` and `true` are no integers. In a create, null counts as not sent. An unknown
field or query parameter is 400 by its name. A JSON body may have 1 MiB and 10,000 values; lines of a
release, 50,000.

**Rates.** Requests are counted in fixed windows of 60 seconds for each client id: 600, and 1,200 generations, unless
the operator has set others. At the same time 64 generations, 4 uploads, 4 combinations of datasets and 16 streams are
accepted; fewer, but at least one, while others use most of the service. After 60 refusals with `Retry-After` in a
minute each further one is delayed by a second. The headers of a 401 show the window of refused keys of the caller's
address.

**Versions.** The path names the version; `/v1` may be left out. Within `v1` only optional fields, operations and event
kinds are added: ignore what you do not know. What will be removed is announced by the headers `Deprecation` and
`Sunset`, and goes with a new version only. *Additive* marks what tuneship has beyond the API that it shares with other
services: a client that does not know it never notices it.
"""

# Errors that no rule of an operation brings: framing, keys, scopes, rates, faults.
ON_ALL = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_denied"} | {
    414: "invalid_request_error",
    429: "rate_limit_exceeded",
    431: "invalid_request_error",
    500: "internal_error",
    503: "internal_error",
}
# Errors of the body as such: too slow, too long, of another type.
WITH_BODY = dict.fromkeys((408, 413, 415), "invalid_request_error")

HEADER_NOTES = {
    "X-Request-ID": (
        "string",
        "Id of this request; it stands in error bodies and in every log line.",
    ),
    "X-RateLimit-Limit": ("integer", "Requests allowed in a window of 60 seconds."),
    "X-RateLimit-Remaining": ("integer", "Requests left in the current window."),
    "X-RateLimit-Reset": ("integer", "When the window resets, UTC epoch seconds."),
    # Without it, SDKs retry exhausted quotas and wrong states, which have statuses that they repeat.
    "X-Should-Retry": ("string", "`true` when the same request may succeed later, else `false`."),
    "Retry-After": ("integer", "Seconds to wait before another try, 1 to 120."),
    "WWW-Authenticate": ("string", "`Bearer`."),
    "Location": ("string", "Path of what was created."),
    "Idempotent-Replayed": ("string", "`true` on the stored answer to a repeated request."),
    "ETag": ("string", "Version of the record, for `If-Match`."),
    "X-Deployment-ID": ("string", "The deployment that answered."),
    "X-API-Profile": ("string", "The profile of the answer."),
}
# Written out: the standard library's change with the version of Python.
PHRASES = {
    200: "OK",
    201: "Created",
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    408: "Request timeout",
    409: "Conflict",
    412: "Precondition failed",
    413: "Content too large",
    414: "Address too long",
    415: "Unsupported media type",
    422: "Unprocessable content",
    429: "Too many requests",
    431: "Headers too large",
    500: "Internal server error",
    503: "Service unavailable",
}
ON_EVERY_ANSWER = (
    "X-Request-ID",
    "X-RateLimit-Limit",
    "X-RateLimit-Remaining",
    "X-RateLimit-Reset",
)
# On every answer that lists them; the others may be missing.
ALWAYS_SENT = {"X-Request-ID", "X-Should-Retry", "WWW-Authenticate", "Location"}

REQUEST_HEADERS: dict[str, tuple[Json, str]] = {
    "Idempotency-Key": (
        {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[\\x20-\\x7e]+$"},
        (
            "The same key and body within 24 hours give the first answer again instead of a second change; another "
            "body or `If-Match` is 422, a first request that is not answered yet 409."
        ),
    ),
    "If-Match": (
        {"type": "string"},
        (
            "Refuse with 412 unless this is still the record's `ETag`. Without it the last change wins. A change of "
            "something that has no `ETag` is 400 with this header."
        ),
    ),
    "X-Routing-Key": (
        {"type": "string", "minLength": 1, "maxLength": 256},
        (
            "Requests with the same key go to the same member of a canary endpoint, unless the key is a large one "
            "(`large_keys`)."
        ),
    ),
    "X-API-Profile": (
        {"type": "string", "enum": ["full", "simplified", "auto"]},
        (
            "The shape of the answer: `full` and `simplified` have exactly the fields of one of the two references of "
            "this API, without those that have no value; `auto` has the fields of both. Default: what the operator "
            "has set for the client id, else for the service. Lists in `simplified` have no pages: they hold the "
            "newest thousand, unless `limit` or `offset` is sent."
        ),
    ),
    "Last-Event-ID": ({"type": "string"}, "Continue a stream behind this event, like `after`."),
}


HEADER_COMPONENTS: Json = {
    name: {
        "description": text,
        **({"required": True} if name in ALWAYS_SENT else {}),
        "schema": {"type": kind},
    }
    for name, (kind, text) in HEADER_NOTES.items()
}
PARAMETER_COMPONENTS: Json = {
    name: {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
    for name, (schema, text) in REQUEST_HEADERS.items()
}


def document(url: str = "http://127.0.0.1:8700", created_status: int = CREATED) -> Json:
    """The whole document. `url` is the address of its server, whose creates answer with `created_status`."""
    texts = {module.__name__.rpartition(".")[2]: text for module, text in SECTIONS.items()}
    sections = list(texts)
    # One that is declared elsewhere, e.g. in a test, is not part of the API.
    operations = [operation for operation in DECLARED if operation.resource in texts]
    schemas = Schemas(operations)
    responses: dict[str, Json] = {}
    paths: dict[str, Json] = {}
    for operation in sorted(operations, key=lambda one: (sections.index(one.resource), one.path)):
        status = created_status if operation.is_creating else operation.status
        # Another operation at the same path takes `If-Match`.
        has_etag = operation.method != "DELETE" and any(
            "If-Match" in other.headers and other.path == operation.path for other in operations
        )
        entry = _OperationEntry(operation, schemas, status, has_etag=has_etag)
        # OpenAPI knows no parameter that takes the rest of a path; the ids are percent-encoded.
        path = re.sub(r"{(\w+):path}", r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = entry.as_json(responses)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tuneship", "version": "v1", "description": DESCRIPTION},
        "servers": [{"url": url}],
        "tags": [{"name": name, "description": text} for name, text in texts.items()],
        "security": [{"bearerAuth": [], "clientId": []}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": dict(sorted(responses.items())),
            "headers": HEADER_COMPONENTS,
            "parameters": PARAMETER_COMPONENTS,
            "securitySchemes": {
                "bearerAuth": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The API key. Its scopes are some of "
                    f"{', '.join(f'`{scope}`' for scope in sorted(SCOPES))}.",
                },
                "clientId": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "X-Client-ID",
                    "description": "The tenant. A key belongs to one; with another one it is 401.",
                },
            },
        },
    }


def possible_errors(operation: Operation[..., Any]) -> dict[int, tuple[str, ...]]:
    """Every status of an error of this operation, with its possible codes."""
    possible = [*ON_ALL.items()]
    if operation.path_parameters:
        possible.append((404, "resource_not_found"))
    if operation.method in ("POST", "PATCH"):
        possible += WITH_BODY.items()
    if operation.takes_idempotency_key:  # in flight; used with another body
        possible += [(409, "invalid_request_error"), (422, "validation_error")]
    if operation.body_parameter or operation.query_model.model_fields:
        possible.append((422, "validation_error"))
    if "If-Match" in operation.headers:
        possible.append((412, "invalid_request_error"))
    for error in operation.errors:
        kind, status = error if isinstance(error, tuple) else (error, error.statuses[0])
        if status not in kind.statuses:
            raise ValueError(f"{kind.code} cannot have the status {status}")
        possible.append((status, kind.code))
    # Several rules may refuse with one status, and a status has one entry in the document.
    codes: dict[int, set[str]] = {}
    for status, code in possible:
        codes.setdefault(status, set()).add(code)
    return {status: tuple(sorted(codes[status])) for status in sorted(codes)}


class _OperationEntry:
    """One operation's entry under its path."""

    def __init__(
        self, operation: Operation[..., Any], schemas: Schemas, status: int, *, has_etag: bool
    ) -> None:
        self._operation = operation
        self._schemas = schemas
        self._status = status
        self._has_etag = has_etag

    def as_json(self, shared_responses: dict[str, Json]) -> Json:
        operation = self._operation
        # The summary is the docstring's first sentence. References to the API description are for readers of the code.
        description = without_references(text_of(operation.declaration.__doc__))
        entry: Json = {
            "operationId": operation.name,
            "tags": [operation.resource],
            "summary": summary_of(description),
            "description": f"{description}\n\nScope: `{operation.scope}`.",
            "security": [
                {"bearerAuth": [operation.scope]}
                | ({} if operation.takes_key_alone else {"clientId": []})
            ],
            "parameters": [*self._parameters()],
        }
        if operation.body_parameter is not None:
            entry["requestBody"] = self._body(operation.body_parameter[0])
        entry["responses"] = {str(self._status): self._reply()}
        for status, codes in possible_errors(operation).items():
            phrase = PHRASES[status].title().replace(" ", "")
            # The usual codes of a status have a short name; another set of codes is another response.
            usual = (ON_ALL | WITH_BODY | {404: "resource_not_found", 422: "validation_error"}).get(
                status
            )
            name = phrase if codes == (usual,) else f"{phrase}_{'_'.join(codes)}"
            if name not in shared_responses:
                shared_responses[name] = _error_response(status, codes)
            entry["responses"][str(status)] = {"$ref": f"#/components/responses/{name}"}
        return entry

    def _parameters(self) -> Iterable[Json]:
        operation = self._operation
        for name in operation.path_parameters:
            schema = self._schemas.path_of(operation, name)
            example = {"example": PATH_VALUES[name]} if name in PATH_VALUES else {}
            yield {"name": name, "in": "path", "required": True, "schema": schema, **example}

        for name, described in self._schemas.query_of(operation).items():
            # The description belongs to the parameter; generators overlook it inside of a schema.
            schema = {key: value for key, value in described.items() if key != "description"}
            text = {"description": described["description"]} if "description" in described else {}
            is_object = schema.get("type") == "object"  # tags[key]=value
            style = {"style": "deepObject", "explode": True} if is_object else {}
            yield {
                "name": name,
                "in": "query",
                "required": False,
                **text,
                **style,
                "schema": schema,
            }

        headers = ["Idempotency-Key"] if operation.takes_idempotency_key else []
        for name in [*headers, *operation.headers]:
            yield {"$ref": f"#/components/parameters/{name}"}

    def _body(self, parameter: str) -> Json:
        operation = self._operation
        schema, required = self._schemas.body_of(operation)
        content: Json = {"schema": schema}
        if operation.example.requests:
            content["examples"] = {
                name: {"value": value} for name, value in operation.example.requests.items()
            }
        # Clients differ in the type that they give to a part of a form, so it is named.
        if operation.is_form:
            content["encoding"] = {"file": {"contentType": operation.file_media.name}}
            if "tags" in operation.hints[parameter].model_fields:
                content["encoding"]["tags"] = {"contentType": "application/json"}
        media = "multipart/form-data" if operation.is_form else "application/json"
        # A patch without any field is valid, and yet a body must be sent.
        return {"required": required or operation.method == "PATCH", "content": {media: content}}

    def _reply(self) -> Json:
        operation = self._operation
        if operation.is_download:
            media: Json = {TAR.name: {"schema": {"type": "string", "format": "binary"}}}
        else:
            content: Json = {"schema": self._schemas.reply_of(operation)}
            if operation.example.reply is not None:
                content["example"] = operation.example.reply
            media = dict.fromkeys(operation.media, content)
        if operation.may_stream:
            for name, schema in self._schemas.frames_of(operation).items():
                media[name] = {"schema": schema, "example": operation.example.streams.get(name)}
        may_have = {
            "Location": operation.is_creating,
            "Idempotent-Replayed": operation.takes_idempotency_key,
            "ETag": self._has_etag,
            "X-Deployment-ID": operation.scope == "generate",
            "X-API-Profile": "X-API-Profile" in operation.headers,
        }
        headers = [*ON_EVERY_ANSWER, *(name for name, holds in may_have.items() if holds)]
        return {
            "description": PHRASES[self._status],
            "headers": _header_references(headers),
            "content": media,
        }


def _header_references(names: Iterable[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


# Examples for codes that stand for several errors: the first line of the class is too general there.
ERROR_TEXTS = {
    ("validation_error", 422): ("limit must be between 1 and 100", "limit"),
    ("invalid_request_error", 408): ("the body did not come in time", None),
    ("invalid_request_error", 409): ("the state of the resource does not allow this", None),
    ("invalid_request_error", 412): ("the record has changed since it was read", None),
    ("invalid_request_error", 413): ("the body is larger than 1 MiB", None),
    ("invalid_request_error", 414): ("the address is longer than 8 KiB", None),
    ("invalid_request_error", 415): ("the body must be application/json in UTF-8", None),
    ("invalid_request_error", 431): ("the headers are larger than 16 KiB", None),
    ("internal_error", 503): ("the database or the disk is not available", None),
}


def _error_response(status: int, codes: tuple[str, ...]) -> Json:
    headers = ["X-Request-ID", "X-Should-Retry"]
    # A request that is too long is refused before its caller is known. A 401 does carry these headers,
    # but they count the failures of its address, and the document describes the rate of a client.
    headers += ON_EVERY_ANSWER[1:] if status not in (401, 414, 431) else ()
    headers += ["Retry-After"] if status in (408, 409, 429, 503) else ()
    headers += ["WWW-Authenticate"] if status == 401 else ()
    notes: list[str] = []
    examples: Json = {}
    for code in codes:
        kind: type[ApiError] = BY_CODE[code]
        meaning = text_of(kind.__doc__)
        notes.append(f"`{code}`: {meaning}")
        usual = meaning.partition("\n")[0].removesuffix(".").lower()
        message, param = ERROR_TEXTS.get((code, status), (usual, None))
        details = [ErrorDetail(param, "out_of_range", message.partition(" ")[2])] if param else []
        # A real error renders it, so that the example has the shape of what is sent.
        error = kind(message, param=param, details=details, status=status)
        examples[code] = {"value": error.as_json(REQUEST)}
    return {
        "description": "\n\n".join([PHRASES[status], *notes]),
        "headers": _header_references(headers),
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/Error"},
                "examples": examples,
            }
        },
        "x-error-codes": list(codes),
    }
