"""The OpenAPI document says what is declared, its examples are valid, and the committed snapshot equals it."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from tuneship.cli import main as cli
from tuneship.contract.common import SERVICE
from tuneship.contract.declaring.operation import DECLARED, TAR, Example, Operation
from tuneship.contract.document.openapi import document, possible_errors
from tuneship.contract.errors import BY_CODE, DatasetError, ErrorDetail, FineTuningError
from tuneship.contract.openai.document import openai_document

DOCUMENT = document()
DOCS = Path(__file__).parents[3] / "docs"
ENTRIES = {
    entry["operationId"]: (method, path, entry)
    for path, methods in DOCUMENT["paths"].items()
    for method, entry in methods.items()
}
EACH = pytest.mark.parametrize("operation", DECLARED, ids=lambda one: one.name)


def conforms(value: Any, schema: dict[str, Any]) -> None:
    """Raise unless the value fits a schema of the document."""
    whole = {**schema, "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(
        whole, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    ).validate(value)


def content(place: dict[str, Any]) -> dict[str, Any]:
    return next(iter(place["content"].values()))


@pytest.mark.parametrize(
    ("file", "whole", "options"),
    [("openapi.json", DOCUMENT, []), ("openapi-openai.json", openai_document(), ["--openai"])],
)
def test_the_committed_snapshot_is_the_document_that_the_command_prints(
    file: str, whole: dict[str, Any], options: list[str]
) -> None:
    arguments = ["openapi", *options]
    assert json.loads((DOCS / file).read_text()) == whole, f"run: tuneship {' '.join(arguments)}"
    assert json.loads(CliRunner().invoke(cli.app, arguments).stdout) == whole


def test_every_declared_operation_stands_in_the_document_under_its_address() -> None:
    assert {
        (one.name, one.method.lower(), one.path.replace(":path}", "}")) for one in DECLARED
    } == {(name, method, path) for name, (method, path, _) in ENTRIES.items()}


@EACH
def test_an_operation_is_reported_in_words(operation: Operation[..., Any]) -> None:
    entry = ENTRIES[operation.name][2]
    assert 3 < len(entry["summary"]) < 100
    assert "§" not in json.dumps(entry, ensure_ascii=False)
    assert operation.scope in entry["description"]
    assert entry["tags"][0] in {tag["name"] for tag in DOCUMENT["tags"]}
    named = {one.get("name") for one in entry["parameters"]}
    assert {*operation.path_parameters, *operation.query_model.model_fields} <= named


@EACH
def test_its_examples_pass_the_models_and_the_schemas(operation: Operation[..., Any]) -> None:
    example, entry = operation.example, ENTRIES[operation.name][2]
    if operation.is_download:
        (media,) = entry["responses"]["200"]["content"]
        assert (media, example) == (TAR.name, Example())
        return
    assert example.reply is not None, "name one beside the declaration: @operation(..., example=)"
    conforms(example.reply, content(entry["responses"][str(operation.status)])["schema"])
    adapter = operation.reply_type
    again = adapter.dump_python(adapter.validate_python(example.reply), mode="json", by_alias=True)
    assert again == example.reply
    assert bool(example.streams) == operation.may_stream
    if operation.body_parameter is None:
        assert not example.requests
        return
    model: type[BaseModel] = operation.body_parameter[1]
    assert example.requests or not model.model_fields
    for request in example.requests.values():
        assert ("file" in request) == operation.is_form
        fields = {name: value for name, value in request.items() if name != "file"}
        model.model_validate(fields, context=SERVICE, by_alias=True, by_name=False)
        conforms(request, content(entry["requestBody"])["schema"])


@EACH
def test_its_refusals_are_named_with_true_examples(operation: Operation[..., Any]) -> None:
    responses = ENTRIES[operation.name][2]["responses"]
    assert set(responses) - {str(operation.status)} == {
        str(status) for status in possible_errors(operation)
    }
    for status, codes in possible_errors(operation).items():
        name = responses[str(status)]["$ref"].rpartition("/")[2]
        response = DOCUMENT["components"]["responses"][name]
        assert response["x-error-codes"] == list(codes)
        for code, example in content(response)["examples"].items():
            assert status in BY_CODE[code].statuses
            assert example["value"]["error"]["code"] == code
            conforms(example["value"], content(response)["schema"])


def test_every_code_but_that_of_a_failed_job_can_come_from_some_operation() -> None:
    possible = {
        code for one in DECLARED for codes in possible_errors(one).values() for code in codes
    }
    assert possible == set(BY_CODE) - {FineTuningError.code}


def test_a_fault_of_lines_is_of_the_documented_shape() -> None:
    detail = ErrorDetail("response", "empty_value", "must not be empty", line=3)
    refusal = DatasetError("a line is refused", param="file", details=[detail])
    conforms(refusal.as_json("req_1"), {"$ref": "#/components/schemas/Error"})
    with pytest.raises(jsonschema.ValidationError):
        conforms({"detail": "Not Found"}, {"$ref": "#/components/schemas/Error"})


def test_a_file_is_sent_in_a_form_and_everything_needs_both_headers() -> None:
    body = ENTRIES["upload_dataset"][2]["requestBody"]["content"]["multipart/form-data"]
    form = DOCUMENT["components"]["schemas"]["DatasetUpload"]
    assert form["properties"]["file"]["format"] == "binary"
    assert set(form["required"]) == {"name", "format", "file"}
    assert body["encoding"]["tags"] == {"contentType": "application/json"}
    for one in DECLARED:
        needed = {"bearerAuth"} if one.takes_key_alone else {"bearerAuth", "clientId"}
        assert set(ENTRIES[one.name][2]["security"][0]) == needed
    assert [one.name for one in DECLARED if one.takes_key_alone] == ["read_metrics"]


def test_every_reference_leads_somewhere_and_every_component_is_used() -> None:
    text = json.dumps(DOCUMENT)
    for kind in ("schemas", "responses", "headers", "parameters"):
        for name in DOCUMENT["components"][kind]:
            assert f'"#/components/{kind}/{name}"' in text, name
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/components/')[1:]}:
        kind, name = reference.split("/")
        assert name in DOCUMENT["components"][kind]
