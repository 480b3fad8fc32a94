"""Reads the user's JSON Lines files in the pipeline: their digest, their questions, their overlap.

Texts stay in memory. The format of a line is in `tuneship/contract/lines/dataset_lines.py`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from flows.shared.errors import BadInput
from tuneship.contract.lines.dataset_lines import (
    LINE_LIMIT_BYTES,
    DatasetFormat,
    ExampleProblem,
    Message,
    decode_line,
    parse_line,
    text_of,
)
from tuneship.contract.lines.line_fields import format_of
from tuneship.contract.lines.reading_lines import lines_up_to, numbered

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class EvaluationExample:
    """The prompt and the expected answer of one row."""

    prompt: str
    answer: str


def content_sha256(file: Path) -> str:
    """SHA-256 of a file's bytes. Raises `BadInput` when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def format_of_file(file: Path) -> DatasetFormat:
    """The format of a file by the fields of its first line. Raises `BadInput` for a file that has none."""
    try:
        with file.open("rb") as stream:
            _, first = next(numbered(lines_up_to(stream, LINE_LIMIT_BYTES)), (1, b""))
        return format_of(decode_line(first))
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror})") from None
    except ExampleProblem as problem:
        raise BadInput(f"{file}: its first line {problem.message}") from None


def questions(file: Path, dataset_format: DatasetFormat, limit: int) -> list[EvaluationExample]:
    """The first rows with one question and one answer; longer conversations have no `prompt` form."""
    single_turns = (
        row
        for row in _rows(file, dataset_format)
        if [message["role"] for message in row] == ["user", "assistant"]
        and "tool_calls" not in row[1]
    )
    return [
        EvaluationExample(question["content"], answer["content"].strip())
        for question, answer in islice(single_turns, limit)
    ]


def overlap(
    validation_file: Path, training_files: Sequence[Path], dataset_format: DatasetFormat
) -> int:
    """Number of distinct validation rows that are in the training files too and would flatter the loss."""
    held_out = {_fingerprint(row) for row in _rows(validation_file, dataset_format)}
    trained = (row for file in training_files for row in _rows(file, dataset_format))
    return len({mark for mark in map(_fingerprint, trained) if mark in held_out})


def _rows(file: Path, dataset_format: DatasetFormat) -> Iterator[list[Message]]:
    with file.open("rb") as stream:
        for _, line in numbered(lines_up_to(stream, LINE_LIMIT_BYTES)):
            try:
                yield parse_line(line, dataset_format)
            except ExampleProblem:
                continue  # the service's verdict on the file counts, and it came first


def _fingerprint(row: Sequence[Message]) -> bytes:
    # Without separators, different rows could make the same text.
    text = "\x1f".join(f"{message['role']}\x1e{text_of(message)}" for message in row)
    return hashlib.sha256(text.encode()).digest()
