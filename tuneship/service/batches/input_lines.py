"""Reads the requests of a batch's file: all of them once, to check them, and then one after the other.

Knows no database and no handler. A problem names its line and its field, never what stands there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from tuneship.contract import strict_json
from tuneship.contract.dataset_lines import BYTE_ORDER_MARK
from tuneship.contract.openai.batches import (
    MAXIMUM_EMBEDDED_TEXTS,
    MAXIMUM_REQUESTS,
    BatchError,
)

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


@dataclass(frozen=True)
class RequestLine:
    """A request of a batch."""

    custom_id: str
    body: dict[str, Any]


class BadRequestLine(Exception):
    """A line holds no request; `code`, `message` and `param` are as in the batch's `errors`."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def at(self, line: int) -> BatchError:
        """The problem with its place."""
        return BatchError(code=self.code, message=self.message, param=self.param, line=line)


@dataclass
class InputReading:
    """The result of checking a file."""

    requests: int
    errors: list[BatchError]


def check_input(file: BinaryIO, endpoint: str, most: int = MAXIMUM_REQUESTS) -> InputReading:
    """Read a file from its start to its end. Raises `OSError`."""
    reading, seen, texts = InputReading(0, []), set[str](), 0
    for number, line in _numbered(file):
        reading.requests += 1
        if reading.requests > most:
            reading.errors.append(_too_many("requests", most))
            return reading
        try:
            request = parse_line(line, endpoint)
        except BadRequestLine as problem:
            reading.errors.append(problem.at(number))
        else:
            if request.custom_id in seen:
                problem = BadRequestLine("duplicate_custom_id", DUPLICATE, "custom_id")
                reading.errors.append(problem.at(number))
            seen.add(request.custom_id)
            texts += _texts_in(request) if endpoint == EMBEDDINGS else 0
        if texts > MAXIMUM_EMBEDDED_TEXTS:
            reading.errors.append(_too_many("texts to embed", MAXIMUM_EMBEDDED_TEXTS))
            return reading
        if len(reading.errors) >= MAXIMUM_PROBLEMS:
            return reading
    if not reading.requests:
        text = (
            "The input file is empty. Please ensure that the batch contains at least one request."
        )
        reading.errors.append(BatchError(code="empty_file", message=text))
    return reading


def _too_many(what: str, most: int) -> BatchError:
    text = f"The number of {what} in the input file exceeds the maximum of {most}."
    return BatchError(code="too_many_tasks", message=text)


def _texts_in(request: RequestLine) -> int:
    """The texts that a request for embeddings has; a list of token ids is one."""
    sent: Any = request.body.get("input")
    if not isinstance(sent, list):
        return 1
    texts = cast("list[Any]", sent)
    return len(texts) if texts and isinstance(texts[0], str | list) else 1


def requests_of(file: BinaryIO, endpoint: str, skipped: int) -> Iterator[RequestLine]:
    """The requests of a checked file behind the first `skipped` ones. Raises `OSError` and `BadRequestLine`."""
    for place, (_, line) in enumerate(_numbered(file)):
        if place >= skipped:
            yield parse_line(line, endpoint)


def parse_line(line: bytes, endpoint: str) -> RequestLine:
    """The request of a line. Raises `BadRequestLine`."""
    if len(line) > MAXIMUM_LINE_BYTES:
        text = f"This line is longer than {MAXIMUM_LINE_BYTES >> 20} MiB."
        raise BadRequestLine("invalid_request", text)
    try:
        value = strict_json.parse(line)
    except strict_json.JsonRefused:
        value = None
    if not isinstance(value, dict):
        raise BadRequestLine("invalid_json_line", "This line is not parseable as valid JSON.")
    return _request_of(cast("dict[str, Any]", value), endpoint)


def _request_of(fields: dict[str, Any], endpoint: str) -> RequestLine:
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
    return RequestLine(custom_id, cast("dict[str, Any]", body))


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The numbers, from 1, and the bytes of the lines that are not blank; of a line that is too long, its beginning."""
    number = 0
    while line := file.readline(MAXIMUM_LINE_BYTES + 2):
        number += 1
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(1 << 16)
        if line.strip():
            yield number, line.rstrip(b"\r\n")
