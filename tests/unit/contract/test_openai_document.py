"""The examples of OpenAI's API pass the models and the types of the `openai` package."""

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

from tuneship.contract.common import SERVICE
from tuneship.contract.openai.declaring import OPENAI, OpenAIOperation
from tuneship.contract.openai.document import openai_document


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


def test_every_operation_stands_in_the_document() -> None:
    entries = [entry for path in DOCUMENT["paths"].values() for entry in path.values()]
    assert {entry["operationId"] for entry in entries} == {one.name for one in OPENAI}
    assert all(one.name.startswith("openai_") for one in OPENAI)


@pytest.mark.parametrize("operation", OPENAI, ids=lambda one: one.name)
def test_its_examples_pass(operation: OpenAIOperation[..., Any]) -> None:
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
