"""Makes a dataset of the rows of a run: each becomes a prompt and its right answer, or the run is refused."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tuneship.contract.common import count
from tuneship.contract.datasets import DatasetStatus, DatasetUpload
from tuneship.contract.errors import DatasetError, ErrorDetail, ResourceNotFound
from tuneship.contract.graders import Grader
from tuneship.contract.lines.dataset_lines import LINE_LIMIT_BYTES, decode_line
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.reading_lines import lines_up_to, numbered
from tuneship.contract.openai.eval_runs import MAXIMUM_ROWS, EvalRunCreate, RunSource, SentRow
from tuneship.contract.openai.eval_templates import line_of
from tuneship.contract.openai.evals import EvalCriterion
from tuneship.evaluation.items import EvaluationItem, MetadataRefused
from tuneship.evaluation.json_values import TimedSchema, check_row
from tuneship.evaluation.templates import check_texts
from tuneship.security.sealed_files import ObjectDamaged
from tuneship.service.answers.field_errors import MAX_DETAILS, error_from_pydantic
from tuneship.service.context.context import Context
from tuneship.service.context.quotas import check_disk, own_room, reserve, staging
from tuneship.service.context.staged_bytes import SPACE_CHECK_BYTES
from tuneship.service.datasets.lookup import refuse_unsafe
from tuneship.service.datasets.new_datasets import counts, new_row, read_now, store
from tuneship.service.evaluations.held_out import MAXIMUM_CHARACTERS
from tuneship.service.openai.batch_files import find_batch_file, open_batch_file
from tuneship.store.database.tables import BatchFileRow, EvalRow
from tuneship.store.files.blobs import StagedFile
from tuneship.store.records.batch_records import EVAL_ROWS

SOURCE = "data_source.source"


@dataclass(frozen=True)
class StoredRows:
    """The row of the dataset, the SHA-256 of its plain bytes, and the number of its lines."""

    dataset: Mapping[str, Any]
    sha256: str
    count: int


class _Problems:
    """The problems of the rows, each with its place."""

    def __init__(self, source: RunSource) -> None:
        self._is_file = source.type == "file_id"
        self._details: list[ErrorDetail] = []
        self._count = 0

    def add(self, number: int, problem: ExampleProblem) -> None:
        """Note a problem of a row: of a line from 1, or of an entry of the request from 0."""
        self._count += 1
        if len(self._details) >= MAX_DETAILS:
            return
        field, line = problem.field, number if self._is_file else None
        if not self._is_file:
            field = f"{SOURCE}.content[{number}]" + (f".{field}" if field else "")
        self._details.append(ErrorDetail(field, problem.code, problem.message, line=line))

    def refuse(self) -> None:
        """Raise `DatasetError` if there are any."""
        if not self._details:
            return
        first = self._details[0]
        place = first.field or "it" if first.line is None else f"line {first.line}: {first.field}"
        text = f"{count(self._count, 'row')} cannot be used; the first: {place} {first.message}"
        param = SOURCE if first.line is not None else first.field
        raise DatasetError(text, param=param, details=self._details)


def store_rows(
    context: Context, asked: EvalRow, run: EvalRunCreate, graders: Sequence[Grader]
) -> StoredRows:
    """Store the rows as a dataset of the caller. Raises `DatasetError` with the places, and the refusals of quotas."""
    source = run.data_source.source
    file = _file_of(context, source)
    problems = _Problems(source)
    with staging(context) as staged:
        rows = _rows_of(context, source, file, problems)
        numbers = _render(context, asked, run, graders, rows, staged, problems)
        problems.refuse()
        base = context.parts.catalogue.default
        reading = read_now(context, staged, "conversation", base)
        for one in reading.errors:
            place = f"item: {one.field}" if one.field else "item"
            problems.add(numbers[(one.line or 1) - 1], ExampleProblem(one.code, place, one.message))
        problems.refuse()
        form = DatasetUpload(name=f"rows of {asked['id']}", format="conversation")
        row = new_row(context, form) | {
            "format": "conversation",
            "tokenizer": base.id,
            "status": DatasetStatus.PROCESSED,
            **counts(reading),
        }
        row["came_safely"] = row["came_safely"] and (file is None or file["came_safely"])
        stored = store(context, row, staged)
        return StoredRows(stored, staged.content_sha256, len(numbers))


def _file_of(context: Context, source: RunSource) -> BatchFileRow | None:
    if source.id is None:
        return None
    file = find_batch_file(context, source.id)
    if file is None or file["purpose"] != EVAL_ROWS:
        # Datasets and files of batches have lines of other forms.
        text = f"{SOURCE}.id must name a file of the purpose evals"
        raise ResourceNotFound(text, param=f"{SOURCE}.id")
    if context.audit_facts.touches_hipaa:
        refuse_unsafe(file, f"{SOURCE}.id", "file")
    return file


def _rows_of(
    context: Context, source: RunSource, file: BatchFileRow | None, problems: _Problems
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The number and the item of each row that can be read."""
    if file is None:
        yield from enumerate(one.item for one in source.content or ())
        return
    with _opened(context, file) as lines:
        for number, line in lines:
            try:
                yield number, SentRow.model_validate(decode_line(line)).item
            except ValidationError as error:
                one = error_from_pydantic(error).details[0]
                problems.add(number, ExampleProblem(one.code, one.field, one.message))
            except ExampleProblem as problem:
                problems.add(number, problem)


@contextmanager
def _opened(context: Context, file: BatchFileRow) -> Generator[Iterator[tuple[int, bytes]]]:
    parts = context.parts
    try:
        with open_batch_file(parts.database, parts.keyring, parts.blobs, file) as opened:
            yield numbered(lines_up_to(opened, LINE_LIMIT_BYTES))
    except (FileNotFoundError, ObjectDamaged):
        text = "the stored file is damaged or missing"
        raise DatasetError(text, param=f"{SOURCE}.id", status=409) from None


def _render(  # noqa: PLR0913 - what a line follows from, and where it goes
    context: Context,
    asked: EvalRow,
    run: EvalRunCreate,
    graders: Sequence[Grader],
    found: Iterator[tuple[int, Mapping[str, Any]]],
    staged: StagedFile,
    problems: _Problems,
) -> Sequence[int]:
    """Write a line for each row, and return the rows' numbers."""
    schema = TimedSchema(asked["data_source_config"]["item_schema"])
    criteria = [EvalCriterion.model_validate(one).templates for one in asked["testing_criteria"]]
    messages = run.data_source.input_messages.turns
    room, checked, numbers = own_room(context), 0, list[int]()
    check_disk(context)
    for number, item in found:
        if len(numbers) == MAXIMUM_ROWS:
            raise DatasetError(f"{SOURCE} has more than {MAXIMUM_ROWS} rows", param=SOURCE)
        numbers.append(number)
        try:
            check_row(schema, item)
            line = line_of(item, messages, criteria)
            answer = line["messages"][-1]["content"]
            check_texts([EvaluationItem((), answer, metadata=line["metadata"])], graders)
        except ExampleProblem as problem:
            problems.add(number, problem)
            continue
        except MetadataRefused as refused:
            text = f"cannot be scored by a criterion, which {refused.message}"
            problems.add(number, ExampleProblem(refused.code, "item", text))
            continue
        content = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        if staged.size + len(content) > MAXIMUM_CHARACTERS:
            text = f"{SOURCE} makes more than {MAXIMUM_CHARACTERS >> 20} MiB of prompts"
            raise DatasetError(text, param=SOURCE)
        reserve(context, room, arrived=staged.size + len(content))
        if staged.size - checked > SPACE_CHECK_BYTES:
            check_disk(context)
            checked = staged.size
        staged.write(content)
    staged.finish()
    if not numbers:
        problems.refuse()
        raise DatasetError(f"{SOURCE} has no row", param=SOURCE)
    return numbers
