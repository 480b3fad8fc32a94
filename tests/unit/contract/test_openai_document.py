"""The document of OpenAI's API is current, and its examples pass the models and the types of the `openai` package."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai.types import (
    Batch,
    Completion,
    Embedding,
    EvalCreateResponse,
    EvalDeleteResponse,
    FileDeleted,
    FileObject,
    Model,
    ModelDeleted,
)
from openai.types.chat import ChatCompletion
from openai.types.evals import EvalAPIError, RunDeleteResponse, RunRetrieveResponse
from openai.types.evals.runs.output_item_retrieve_response import (
    OutputItemRetrieveResponse,
    Sample,
    SampleUsage,
)
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.responses import Response
from openai.types.webhooks import (
    DeletedWebhookEndpoint,
    WebhookEndpoint,
    WebhookEndpointTestResult,
)
from typer.testing import CliRunner

from tuneship.cli.main import app
from tuneship.contract.common import SERVICE
from tuneship.contract.declaring.scopes import SCOPES
from tuneship.contract.openai.declaring import OPENAI, OpenAIOperation
from tuneship.contract.openai.document import openai_document
from tuneship.service.all_handlers import OPENAI_SERVED


class ShownRun(RunRetrieveResponse):
    """A run as OpenAI's own answers have it: without an error, that is null."""

    error: EvalAPIError | None  # type: ignore[assignment]


class ShownSample(Sample):
    """A sample of which nothing is stored beside how it was made."""

    error: EvalAPIError | None  # type: ignore[assignment]
    finish_reason: str | None  # type: ignore[assignment]
    usage: SampleUsage | None  # type: ignore[assignment]
    seed: int | None  # type: ignore[assignment]
    top_p: float | None  # type: ignore[assignment]


class ShownItem(OutputItemRetrieveResponse):
    """An output item with such a sample."""

    sample: ShownSample  # type: ignore[assignment]


SNAPSHOT = Path(__file__).parents[3] / "docs" / "openapi-openai.json"
DOCUMENT = openai_document()
TYPES: dict[str, Any] = {
    "chat.completion": ChatCompletion,
    "text_completion": Completion,
    "embedding": Embedding,
    "response": Response,
    "model": Model,
    "file": FileObject,
    "batch": Batch,
    "eval": EvalCreateResponse,
    "eval.deleted": EvalDeleteResponse,
    "eval.run": ShownRun,
    "eval.run.deleted": RunDeleteResponse,
    "eval.run.output_item": ShownItem,
    "webhook_endpoint": WebhookEndpoint,
    "webhook_endpoint.deleted": DeletedWebhookEndpoint,
    "webhook_endpoint.test": WebhookEndpointTestResult,
    "fine_tuning.job": FineTuningJob,
    "fine_tuning.job.event": FineTuningJobEvent,
}


def test_the_committed_document_is_current() -> None:
    hint = "run: tuneship openapi --openai > docs/openapi-openai.json"
    assert json.loads(SNAPSHOT.read_text()) == DOCUMENT, hint
    result = CliRunner().invoke(app, ["openapi", "--openai"])
    assert json.loads(result.stdout) == DOCUMENT


def test_every_operation_is_served_has_a_scope_and_stands_in_the_document() -> None:
    assert {one.name for one in OPENAI} == set(OPENAI_SERVED)
    assert all(OPENAI_SERVED[one.name].operation is one for one in OPENAI)
    assert len({(one.method, one.path) for one in OPENAI}) == len(OPENAI)
    assert all(one.name.startswith("openai_") and one.scope in SCOPES for one in OPENAI)
    entries = [entry for path in DOCUMENT["paths"].values() for entry in path.values()]
    assert {entry["operationId"] for entry in entries} == {one.name for one in OPENAI}


@pytest.mark.parametrize("operation", OPENAI, ids=lambda one: one.name)
def test_its_examples_pass(operation: OpenAIOperation[..., Any]) -> None:
    with pytest.raises(NotImplementedError):
        operation.declaration(*[None] * (len(operation.hints) - 1))
    reply = operation.reply_type.validate_python(operation.example.reply)
    assert operation.reply_type.dump_python(reply, mode="json") == operation.example.reply
    shown = operation.example.reply
    entries = shown.get("data", [shown]) if isinstance(shown, dict) else []
    for one in [one for one in entries if isinstance(one, dict)]:
        kind = {"openai_delete_file": FileDeleted, "openai_delete_model": ModelDeleted}.get(
            operation.name, TYPES[one["object"]]
        )
        kind.model_validate(one, strict=True)
    assert (operation.body_parameter is None) == (not operation.example.requests)
    for body in operation.example.requests.values():
        assert operation.body_parameter is not None
        model = operation.body_parameter[1]
        fields = {name: value for name, value in body.items() if name != "file"}
        model.model_validate(fields, context=SERVICE)
        schema = {
            "$ref": f"#/components/schemas/{model.__name__}",
            "components": DOCUMENT["components"],
        }
        jsonschema.Draft202012Validator(schema).validate(body)
