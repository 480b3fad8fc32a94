"""What the dataset operations do: read a file line by line, count, store whole or not at all, merge.

Upload and validate share one reader and one verdict. Reports name line, field and code, never the text.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import sqlalchemy as sa

from tuneship.contract import datasets as contract
from tuneship.contract.datasets import (
    Dataset,
    DatasetCreated,
    DatasetMerge,
    DatasetPage,
    DatasetStatus,
    DatasetSummary,
    DatasetUpload,
    DatasetValidate,
    DatasetValidation,
    FormatDetails,
    LineProblem,
    TokenDistribution,
)
from tuneship.contract.errors import (
    DatasetError,
    ErrorDetail,
    QuotaExceeded,
    ResourceNotFound,
)
from tuneship.contract.examples import DatasetFormat, ExampleProblem, Message, parse_line
from tuneship.service.context import Context
from tuneship.service.refusals import refused
from tuneship.service.serving_table import serves
from tuneship.store import rows, tables
from tuneship.store.events import emit
from tuneship.store.identifiers import new_id
from tuneship.store.rows import Row

LINE_LIMIT = 8 << 20
LINES_LIMIT = 5_000_000
REPORTED = 1000
BATCH_BYTES = 4 << 20
"""Lines are tokenised together up to this size, so that memory does not grow with the file."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04")


@dataclass
class Reading:
    """What is known of a file after its last line."""

    num_examples: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    error_count: int = 0
    errors: list[LineProblem] = field(default_factory=list[LineProblem])
    suggestions: list[str] = field(default_factory=list[str])
    has_instructions: bool = False

    def problem(self, line: int | None, problem: ExampleProblem) -> None:
        """Count a problem; the first thousand are reported."""
        self.error_count += 1
        if len(self.errors) < REPORTED:
            self.errors.append(
                LineProblem(
                    line=line, field=problem.field, code=problem.code, message=problem.message
                )
            )


def _counter(context: Context) -> Callable[[list[str]], int]:
    tokenizer: Any = context.parts.catalogue.default.tokenizer

    def count(texts: list[str]) -> int:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return sum(len(one) for one in encoded)

    return count


def read_lines(
    file: BinaryIO,
    dataset_format: DatasetFormat,
    count: Callable[[list[str]], int],
    copy: BinaryIO | None = None,
) -> Reading:
    """Check every line and count its tokens; `copy` receives the bytes less a byte order mark."""
    reading = Reading()
    batch: list[list[Message]] = []
    size = 0
    for number, line in _numbered(file, reading):
        if copy is not None:
            copy.write(line)
        if line.strip():
            size += len(line)
            try:
                batch.append(parse_line(line.rstrip(b"\r\n"), dataset_format))
            except ExampleProblem as problem:
                reading.problem(number, problem)
        if size >= BATCH_BYTES:
            _tally(reading, batch, count)
            batch, size = [], 0
    _tally(reading, batch, count)
    if reading.num_examples == 0 and reading.error_count == 0:
        reading.problem(None, ExampleProblem("no_examples", None, "the file holds no example"))
    return reading


def _numbered(file: BinaryIO, reading: Reading) -> Iterator[tuple[int, bytes]]:
    """Physical lines from 1; stops at what makes the rest unreadable."""
    number = 0
    while line := file.readline(LINE_LIMIT + 2):  # the limit, and the end of the line
        number += 1
        if number == 1 and line.startswith(COMPRESSED):
            reading.problem(None, ExampleProblem("compressed_file", None, "is compressed"))
            return
        if number == 1 and line.startswith(BYTE_ORDER_MARK):
            line = line[len(BYTE_ORDER_MARK) :]
            reading.suggestions.append("A byte order mark at the start was removed.")
        if len(line.rstrip(b"\r\n")) > LINE_LIMIT:
            reading.problem(number, ExampleProblem("line_too_long", None, "is longer than 8 MiB"))
            return
        if number > LINES_LIMIT:
            reading.problem(
                None, ExampleProblem("too_many_lines", None, f"has over {LINES_LIMIT} lines")
            )
            return
        yield number, line


def _tally(reading: Reading, batch: list[list[Message]], count: Callable[[list[str]], int]) -> None:
    turns = [turn for messages in batch for turn in messages]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    others = [turn["content"] for turn in turns if turn["role"] != "assistant"]
    reading.num_examples += len(batch)
    reading.response_tokens += count(answers)
    reading.prompt_tokens += count(others)
    reading.has_instructions |= any(turn["role"] == "user" for turn in turns)


@serves(contract.validate_dataset)
def validate_dataset(context: Context, form: DatasetValidate, file: BinaryIO) -> DatasetValidation:
    """Read the file and report; nothing is kept."""
    reading = read_lines(file, form.format, _counter(context))
    return DatasetValidation(
        is_valid=reading.error_count == 0,
        num_examples=reading.num_examples,
        total_tokens=reading.prompt_tokens + reading.response_tokens,
        token_distribution=TokenDistribution(
            prompt_tokens=reading.prompt_tokens, response_tokens=reading.response_tokens
        ),
        format_details=FormatDetails(
            format=form.format,
            has_instructions=reading.has_instructions,
            has_responses=reading.num_examples > 0,
        ),
        suggestions=reading.suggestions,
        errors=reading.errors,
        error_count=reading.error_count,
        errors_truncated=reading.error_count > len(reading.errors),
    )


@serves(contract.upload_dataset)
def upload_dataset(context: Context, form: DatasetUpload, file: BinaryIO) -> DatasetCreated:
    """Read and copy in one pass; a bad line refuses the file and leaves nothing behind."""
    with context.parts.blobs.staged() as staged:
        reading = read_lines(file, form.format, _counter(context), copy=staged)
        _refuse_errors(reading)
        staged.flush()
        dataset_id = new_id("ds")
        row: dict[str, Any] = {
            **_new_row(context, dataset_id, form),
            "format": form.format,
            "num_examples": reading.num_examples,
            "prompt_tokens": reading.prompt_tokens,
            "response_tokens": reading.response_tokens,
            "source_datasets": None,
            **_digest(staged),
        }
        return DatasetCreated(**_stored(context, row, staged))


def _refuse_errors(reading: Reading) -> None:
    if reading.error_count == 0:
        return
    details = [
        ErrorDetail(one.field, one.code, one.message, line=one.line) for one in reading.errors
    ]
    first = reading.errors[0]
    where = "the file" if first.line is None else f"line {first.line}"
    raise DatasetError(
        f"the dataset has {reading.error_count} problems; the first: {where}: {first.message}",
        param="file",
        details=details,
    )


def _new_row(
    context: Context, dataset_id: str, form: DatasetUpload | DatasetMerge
) -> dict[str, Any]:
    return {
        "id": dataset_id,
        "client_id": context.client_id,
        "name": form.name,
        "description": form.description,
        "tags": form.tags,
        "status": DatasetStatus.PROCESSED,
        "created_at": context.now,
        "updated_at": context.now,
        "tokenizer": context.parts.catalogue.default.id,
        "blob": f"datasets/{dataset_id}/data.jsonl",
    }


def _digest(staged: BinaryIO) -> dict[str, Any]:
    size = staged.tell()
    staged.seek(0)
    digest = hashlib.file_digest(cast("Any", staged), "sha256").hexdigest()
    return {"sha256": digest, "bytes": size}


def _check_quota(context: Context, more_bytes: int) -> None:
    settings, table = context.parts.settings, tables.datasets
    query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(table.c.bytes), 0)).where(
        table.c.client_id == context.client_id
    )
    number, size = context.transaction.execute(query).one()
    if number >= settings.maximum_datasets:
        most = settings.maximum_datasets
        raise QuotaExceeded(f"this client has {most} datasets, the most it may have")
    if size + more_bytes > settings.maximum_dataset_bytes:
        most = settings.maximum_dataset_bytes
        raise QuotaExceeded(f"the datasets of this client may hold {most} bytes in all")


def _stored(context: Context, row: dict[str, Any], staged: BinaryIO) -> dict[str, Any]:
    """The file first, then its row: a file without a row is swept up, a row without a file would be a lie."""
    context.parts.blobs.keep(
        staged, row["blob"]
    )  # before the transaction: others wait for that one
    try:
        _check_quota(context, row["bytes"])
        stored = rows.insert(context.transaction, tables.datasets, row)
    except BaseException:
        context.parts.blobs.delete(f"datasets/{row['id']}")
        raise
    for kind in ("dataset.uploaded", "dataset.processed"):
        emit(context.transaction, kind, row, context.now, num_examples=row["num_examples"])
    return _fields(stored)


def _fields(row: Row) -> dict[str, Any]:
    return {**row, "total_tokens": row["prompt_tokens"] + row["response_tokens"]}


def own_dataset(context: Context, dataset_id: str, param: str | None = None) -> Row:
    """The caller's dataset. Raises `ResourceNotFound`, the same for a missing and for another's."""
    with context.read() as connection:
        row = rows.fetch(connection, tables.datasets, dataset_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such dataset", param=param)
    return row


@serves(contract.get_dataset)
def get_dataset(context: Context, dataset_id: str) -> Dataset:
    """The record."""
    row = own_dataset(context, dataset_id)
    return Dataset(
        **_fields(row),
        token_distribution=TokenDistribution(
            prompt_tokens=row["prompt_tokens"], response_tokens=row["response_tokens"]
        ),
    )


@serves(contract.list_datasets)
def list_datasets(
    context: Context,
    limit: int = 20,
    offset: int = 0,
    format: DatasetFormat | None = None,  # noqa: A002 - the description's name
    tags: dict[str, str] | None = None,
) -> DatasetPage:
    """Newest first."""
    table = tables.datasets
    where = [table.c.client_id == context.client_id, *rows.tags_match(table, tags)]
    if format is not None:
        where.append(table.c.format == format)
    with context.read() as connection:
        page = rows.page(connection, table, where, limit=limit, offset=offset)
    return DatasetPage.model_validate(
        {
            "datasets": [DatasetSummary(**_fields(row)) for row in page.rows],
            "pagination": page.pagination,
        }
    )


@serves(contract.merge_datasets)
def merge_datasets(context: Context, merge: DatasetMerge) -> DatasetCreated:
    """Concatenate in the given order; a copy, so the sources may be deleted."""
    if len(set(merge.dataset_ids)) != len(merge.dataset_ids):
        raise refused("dataset_ids", "must name different datasets")
    sources = [own_dataset(context, one, "dataset_ids") for one in merge.dataset_ids]
    if any(source["status"] != DatasetStatus.PROCESSED for source in sources):
        raise DatasetError("a dataset is not processed", param="dataset_ids", status=409)
    if len({source["format"] for source in sources}) > 1:
        raise DatasetError("the datasets have different formats", param="dataset_ids")
    dataset_id = new_id("ds")
    with context.parts.blobs.staged() as staged:
        for source in sources:
            _append(context, source, staged)
        row: dict[str, Any] = {
            **_new_row(context, dataset_id, merge),
            "format": sources[0]["format"],
            "source_datasets": merge.dataset_ids,
            **{
                name: sum(source[name] for source in sources)
                for name in ("num_examples", "prompt_tokens", "response_tokens")
            },
            **_digest(staged),
        }
        return DatasetCreated(**_stored(context, row, staged))


def _append(context: Context, source: Row, staged: BinaryIO) -> None:
    digest, last = hashlib.sha256(), b""
    with context.parts.blobs.local(source["blob"]).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            staged.write(block)
            last = block[-1:]
    if digest.hexdigest() != source["sha256"]:
        raise DatasetError("a stored dataset is damaged", param="dataset_ids", status=409)
    if last != b"\n":
        staged.write(b"\n")
