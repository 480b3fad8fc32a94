"""The OpenAPI document of the operations below `/openai/v1`, from their declarations: `docs/openapi-openai.json`."""

import re
from collections.abc import Iterable
from typing import Any, cast

from pydantic import TypeAdapter

from tuneship.contract.document.openapi_schemas import (
    TEMPLATE,
    Json,
    Schemas,
    summary_of,
    text_of,
)
from tuneship.contract.openai import (
    batches,
    chat,
    completions,
    embeddings,
    eval_runs,
    evals,
    files,
    jobs,
    models,
    response_events,
    responses,
    webhooks,
)
from tuneship.contract.openai.declaring import OPENAI, PREFIX, OpenAIOperation

# Every file that declares operations, in reading order, with its text in the document.
SECTIONS = {
    chat: "Conversations that a model continues.",
    completions: "Texts that a model answers.",
    embeddings: "Vectors of texts.",
    responses: "Texts and conversations that a model answers, without state.",
    models: "What can be asked.",
    files: "Training data, results of jobs, what batches read and write, and rows of evals.",
    jobs: "Fine-tuning jobs, their events and checkpoints.",
    batches: "Files of requests that are answered in the background.",
    evals: "The form of rows, and the criteria by which answers to them are scored.",
    eval_runs: "Models that answer the rows of an eval in the background, with the scores.",
    webhooks: "Receivers of the events in which jobs and batches end.",
}
FRAMES: dict[str, TypeAdapter[Any]] = {
    chat.openai_create_chat_completion.name: TypeAdapter(chat.ChatChunk),
    completions.openai_create_completion.name: TypeAdapter(completions.TextCompletion),
    responses.openai_create_response.name: TypeAdapter(response_events.ResponseEvent),
}
DESCRIPTION = (
    "The part of OpenAI's API that tuneship offers: the same keys, scopes, limits and rows as its main API. A field of "
    "a request is used, has no effect at the values that are listed, or is refused by name."
)
ERROR: Json = {
    "type": "object",
    "description": "An error; no message holds what was sent.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is refused."},
                "code": {"type": "string"},
                "details": {
                    "type": "array",
                    "description": "The places, where there are several.",
                    "items": {"$ref": TEMPLATE.format(model="ErrorDetail")},
                },
            },
        }
    },
}


def openai_document(url: str = "http://127.0.0.1:8700") -> Json:
    """The whole document; `url` is the address of the service."""
    sections = [module.__name__.rpartition(".")[2] for module in SECTIONS]
    operations = [one for one in OPENAI if one.resource in sections]
    schemas = Schemas(operations, FRAMES)
    paths: dict[str, Json] = {}
    for operation in sorted(operations, key=lambda one: (sections.index(one.resource), one.path)):
        path = re.sub(r"{(\w+):path}", r"{\1}", operation.path).removeprefix(PREFIX.rstrip("/"))
        paths.setdefault(path, {})[operation.method.lower()] = _entry(operation, schemas)

    # Of the models only those that something in the document names.
    components = {**schemas.components, "OpenAIError": ERROR}
    used: set[str] = set()
    names = _names_in(paths)
    while names - used:
        name = min(names - used)
        used.add(name)
        names |= _names_in(components[name])

    return {
        "openapi": "3.1.0",
        "info": {"title": "tuneship, OpenAI's API", "version": "v1", "description": DESCRIPTION},
        "servers": [{"url": url + PREFIX.rstrip("/")}],
        "tags": [
            {"name": name, "description": text}
            for name, text in zip(sections, SECTIONS.values(), strict=True)
        ],
        "security": [{"bearerAuth": []}],
        "paths": paths,
        "components": {
            "schemas": {name: components[name] for name in sorted(used)},
            "securitySchemes": {
                "bearerAuth": {"type": "http", "scheme": "bearer", "description": "The API key."}
            },
        },
    }


def _entry(operation: OpenAIOperation[..., Any], schemas: Schemas) -> Json:
    description = text_of(operation.declaration.__doc__)
    entry: Json = {
        "operationId": operation.name,
        "tags": [operation.resource],
        "summary": summary_of(description),
        "description": f"{description}\n\nScope: `{operation.scope}`.",
        "parameters": [*_parameters(operation, schemas)],
    }
    if operation.body_parameter is not None:
        schema, required = schemas.body_of(operation)
        examples = {name: {"value": one} for name, one in operation.example.requests.items()}
        media = "multipart/form-data" if operation.is_form else "application/json"
        content = {media: {"schema": schema, "examples": examples}}
        entry["requestBody"] = {"required": required, "content": content}
    reply = schemas.reply_of(operation)
    kind = "text/plain" if reply == {"type": "string"} else "application/json"
    answers: Json = {kind: {"schema": reply, "example": operation.example.reply}}
    if operation.may_stream:
        answers["text/event-stream"] = {
            "schema": schemas.frames_of(operation)["application/x-ndjson"]
        }
    error = {"application/json": {"schema": {"$ref": TEMPLATE.format(model="OpenAIError")}}}
    entry["responses"] = {
        "200": {"description": "OK", "content": answers},
        "default": {"description": "An error", "content": error},
    }
    return entry


def _parameters(operation: OpenAIOperation[..., Any], schemas: Schemas) -> Iterable[Json]:
    for name in operation.path_parameters:
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "schema": schemas.path_of(operation, name),
        }
    for name, schema in schemas.query_of(operation).items():
        is_object = schema.get("type") == "object"  # metadata[key]=value
        style = {"style": "deepObject", "explode": True} if is_object else {}
        yield {"name": name, "in": "query", "required": False, **style, "schema": schema}


def _names_in(value: Any) -> set[str]:
    if isinstance(value, list):
        return set[str]().union(*map(_names_in, cast("list[Any]", value)))
    if not isinstance(value, dict):
        return set()
    members = cast("dict[str, Any]", value)
    start, own = TEMPLATE.format(model=""), members.get("$ref")
    names = {own.removeprefix(start)} if isinstance(own, str) else set[str]()
    return names.union(*map(_names_in, members.values()))
