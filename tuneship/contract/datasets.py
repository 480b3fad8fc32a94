"""Datasets on the wire (§2.2, §4.2): validate, upload, get, list, merge. Lines: `tuneship/contract/examples.py`."""

from enum import StrEnum
from typing import Annotated, BinaryIO

from pydantic import Field

from tuneship.contract.common import (
    CreateRequest,
    DatasetId,
    Limit,
    Name,
    Offset,
    Pagination,
    Reply,
    Tags,
    Timestamp,
    absent,
)
from tuneship.contract.examples import DatasetFormat
from tuneship.contract.operation import operation


class DatasetStatus(StrEnum):
    """Files are processed while they are received; `failed` is for what only shows later."""

    UPLOADED = "uploaded"
    PROCESSING = "processing"
    PROCESSED = "processed"
    FAILED = "failed"


class DatasetValidate(CreateRequest):
    """The form of validate, beside its `file`."""

    format: DatasetFormat


class DatasetUpload(CreateRequest):
    """The form of upload, beside its `file`; `tags` travels as JSON text."""

    name: Name
    format: DatasetFormat
    description: Annotated[str, Field(max_length=4096)] = ""
    tags: Tags = Field(default_factory=dict)


class DatasetMerge(CreateRequest):
    """Datasets of one format, concatenated in the given order; nothing is dropped."""

    dataset_ids: Annotated[list[DatasetId], Field(min_length=2, max_length=100)]
    name: Name
    description: Annotated[str, Field(max_length=4096)] = ""
    tags: Tags = Field(default_factory=dict)


class TokenDistribution(Reply):
    """Tokens of the assistant's turns, and of all others; the template is not counted."""

    prompt_tokens: int
    response_tokens: int


class DatasetSummary(Reply):
    """A dataset in a list."""

    id: str
    name: str
    format: str
    num_examples: int
    total_tokens: int
    created_at: Timestamp
    status: str
    tags: dict[str, str] = Field(default_factory=dict)
    source_datasets: Annotated[list[str] | None, Field(exclude_if=absent)] = None


class DatasetCreated(DatasetSummary):
    """A dataset as upload and merge answer it."""

    description: str = ""


class Dataset(DatasetCreated):
    """A dataset as get answers it."""

    token_distribution: TokenDistribution


class DatasetPage(Reply):
    """One page of datasets, newest first."""

    datasets: list[DatasetSummary]
    pagination: Pagination


class FormatDetails(Reply):
    """What the lines hold."""

    format: str
    has_instructions: bool
    has_responses: bool


class LineProblem(Reply):
    """One problem of a file: physical line from 1 (null: the whole file), field, code; never the text."""

    line: int | None
    field: str | None
    code: str
    message: str


class DatasetValidation(Reply):
    """The verdict on a file. A bad file is an answer, not an error."""

    is_valid: bool
    num_examples: int
    total_tokens: int
    token_distribution: TokenDistribution
    format_details: FormatDetails
    suggestions: list[str]
    errors: list[LineProblem] = Field(default_factory=list[LineProblem])
    warnings: list[LineProblem] = Field(default_factory=list[LineProblem])
    error_count: int = 0
    errors_truncated: bool = False


@operation("POST", "/v1/datasets/validate", scope="datasets:read", is_form=True)
def validate_dataset(form: DatasetValidate, file: BinaryIO) -> DatasetValidation:
    """Check a JSON Lines file without making a dataset of it (§4.2)."""
    raise NotImplementedError


@operation("POST", "/v1/datasets", scope="datasets:write", status=201, is_form=True)
def upload_dataset(form: DatasetUpload, file: BinaryIO) -> DatasetCreated:
    """Store a JSON Lines file as a dataset (§4.2). A file with a bad line is refused whole."""
    raise NotImplementedError


@operation("GET", "/v1/datasets/{dataset_id}", scope="datasets:read")
def get_dataset(dataset_id: DatasetId) -> Dataset:
    """Fetch one dataset (§4.2)."""
    raise NotImplementedError


@operation("GET", "/v1/datasets", scope="datasets:read")
def list_datasets(
    limit: Limit = 20,
    offset: Offset = 0,
    format: DatasetFormat | None = None,  # noqa: A002 - the description's name
    tags: Tags | None = None,
) -> DatasetPage:
    """List datasets, newest first (§4.2)."""
    raise NotImplementedError


@operation("POST", "/v1/datasets/merge", scope="datasets:write", status=201)
def merge_datasets(merge: DatasetMerge) -> DatasetCreated:
    """Concatenate datasets into a new one (§4.2)."""
    raise NotImplementedError
