"""Reads the requests of a batch's file: first all of them, for the check, then one after another.

A problem names its line and its field, never what stands there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from pydantic import ValidationError

from tuneship.contract.common import SERVICE
from tuneship.contract.lines import strict_json
from tuneship.contract.lines.reading_lines import is_longer, lines_up_to, numbered
from tuneship.contract.openai.batches import MAXIMUM_EMBEDDED_TEXTS, MAXIMUM_REQUESTS, BatchError
from tuneship.contract.openai.embeddings import EmbeddingsCreate
from tuneship.service.answers.field_errors import error_from_pydantic, field_error
from tuneship.service.batches.output_lines import OPERATIONS, BatchRequest, Body

# As long as the body of one request may be.
MAXIMUM_LINE_BYTES = 1 << 20
MAXIMUM_ID_CHARACTERS = 512
# Problems that are listed; a file with more is not read to its end.
MAXIMUM_PROBLEMS = 100
DUPLICATE = (
    "The custom_id for this request is a duplicate of another request. The custom_id parameter "
    "must be unique for each request in a batch."
)
EMBEDDINGS = "/v1/embeddings"
FIELDS = ("custom_id", "method", "url", "body")


@dataclass(eq=False)
class BadRequestLine(Exception):
    """A line holds no request; the fields are as in the batch's `errors`."""

    code: str
    message: str
    param: str | None = None

    def at(self, line: int) -> BatchError:
        """The problem with its place."""
        return BatchError(code=self.code, message=self.message, param=self.param, line=line)


def check_input(file: BinaryIO, endpoint: str) -> tuple[int, list[BatchError]]:
    """Read a file from its start to its end; return the number of its requests, and its problems. Raises `OSError`."""
    requests, seen, texts = 0, set[str](), 0
    errors: list[BatchError] = []
    for number, line in numbered(lines_up_to(file, MAXIMUM_LINE_BYTES)):
        requests += 1
        if requests > MAXIMUM_REQUESTS:
            errors.append(_too_many("requests", MAXIMUM_REQUESTS))
            return requests, errors
        try:
            custom_id, body = parse_line(line, endpoint)
        except BadRequestLine as problem:
            errors.append(problem.at(number))
        else:
            if custom_id in seen:
                problem = BadRequestLine("duplicate_custom_id", DUPLICATE, "custom_id")
                errors.append(problem.at(number))
            seen.add(custom_id)
            texts += _texts_in(body) if endpoint == EMBEDDINGS else 0
        if texts > MAXIMUM_EMBEDDED_TEXTS:
            errors.append(_too_many("texts to embed", MAXIMUM_EMBEDDED_TEXTS))
            return requests, errors
        if len(errors) >= MAXIMUM_PROBLEMS:
            return requests, errors
    if not requests:
        text = (
            "The input file is empty. Please ensure that the batch contains at least one request."
        )
        errors.append(BatchError(code="empty_file", message=text))
    return requests, errors


def _too_many(what: str, most: int) -> BatchError:
    text = f"The number of {what} in the input file exceeds the maximum of {most}."
    return BatchError(code="too_many_tasks", message=text)


def _texts_in(body: dict[str, Any]) -> int:
    """The number of texts in a request for embeddings; a list of token ids counts as one."""
    sent: Any = body.get("input")
    if not isinstance(sent, list):
        return 1
    texts = cast("list[Any]", sent)
    return len(texts) if texts and isinstance(texts[0], str | list) else 1


def requests_of(file: BinaryIO, endpoint: str, skipped: int) -> Iterator[BatchRequest]:
    """The requests of a checked file, after the first `skipped`. Raises `OSError` and `BadRequestLine`."""
    lines = numbered(lines_up_to(file, MAXIMUM_LINE_BYTES))
    for place, (_, line) in enumerate(lines):
        if place >= skipped:
            custom_id, body = parse_line(line, endpoint)
            yield BatchRequest(custom_id, endpoint, checked_body(body, endpoint))


def checked_body(sent: dict[str, Any], endpoint: str) -> Body | Exception:
    """The parsed body, or the reason why it is refused. Runs in a thread: a long body takes many milliseconds."""
    _, kind = OPERATIONS[endpoint]
    try:
        body = kind.model_validate(sent, context=SERVICE, by_alias=True, by_name=False)
    except ValidationError as error:
        return error_from_pydantic(error)
    except Exception as error:  # noqa: BLE001 - each request is answered, whatever fails
        return error
    if not isinstance(body, EmbeddingsCreate) and body.stream:
        return field_error("stream", "is not supported in a batch", "unsupported_value")
    return body


def parse_line(line: bytes, endpoint: str) -> tuple[str, dict[str, Any]]:
    """The `custom_id` and the body of a line. Raises `BadRequestLine`."""
    if is_longer(line, MAXIMUM_LINE_BYTES):
        text = f"This line is longer than {MAXIMUM_LINE_BYTES >> 20} MiB."
        raise BadRequestLine("invalid_request", text)
    try:
        value = strict_json.parse(line)
    except strict_json.JsonRefused:
        value = None
    if not isinstance(value, dict):
        raise BadRequestLine("invalid_json_line", "This line is not parseable as valid JSON.")
    return _request_of(cast("dict[str, Any]", value), endpoint)


def _request_of(fields: dict[str, Any], endpoint: str) -> tuple[str, dict[str, Any]]:
    for name in FIELDS:
        if fields.get(name) is None:
            text = f"Missing required parameter: '{name}'."
            raise BadRequestLine("missing_required_parameter", text, name)
    if fields.keys() - FIELDS:
        raise BadRequestLine("unknown_parameter", "This line has a field that no request has.")
    custom_id, body = fields["custom_id"], fields["body"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAXIMUM_ID_CHARACTERS:
        text = f"custom_id must be a text of 1 to {MAXIMUM_ID_CHARACTERS} characters."
        raise BadRequestLine("invalid_value", text, "custom_id")
    if fields["method"] != "POST":
        raise BadRequestLine("invalid_value", "method must be POST.", "method")
    if fields["url"] != endpoint:
        text = "The URL provided for this request does not match the batch endpoint."
        raise BadRequestLine("url_mismatch", text, "url")
    if not isinstance(body, dict):
        raise BadRequestLine("invalid_value", "body must be an object.", "body")
    return custom_id, cast("dict[str, Any]", body)
