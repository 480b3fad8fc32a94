"""Datasets on the wire (§2.2, §4.2): validate, upload, get, list, merge. Lines: `dataset_lines.py`."""

from enum import StrEnum
from typing import Annotated, BinaryIO

from pydantic import AfterValidator, BeforeValidator, Field

from tuneship.contract.common import (
    CreateRequest,
    DatasetId,
    Deleted,
    Limit,
    ModelId,
    Name,
    Offset,
    Pagination,
    Reply,
    Tags,
    Timestamp,
    absent,
)
from tuneship.contract.declaring.examples import BASE, DATASET, NOON, OTHER_DATASET, PAGE, TAGS
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.verbs import C_co, Pages, Resource, UploadVerb, Verb
from tuneship.contract.errors import (
    DatasetError,
    ModelNotFound,
    QuotaExceeded,
    ResourceNotFound,
)
from tuneship.contract.lines.dataset_lines import DatasetFormat

# Tag of a dataset with the SHA-256 of its file. The pipeline sets it at the upload, so that one file is one dataset in
# every release.
CONTENT_TAG = "content_sha256"


class DatasetStatus(StrEnum):
    """A small file is `processed` before its upload is answered; a big one is first `processing`, then may be `failed`.

    A small bad file is refused (422) and leaves no row, file or event behind.
    """

    UPLOADED = "uploaded"
    PROCESSING = "processing"
    PROCESSED = "processed"
    FAILED = "failed"


def _not_yet(value: object) -> object:
    """Refuse a format that is planned and not built with a message of its own."""
    if value == "preference":
        raise ValueError(
            "must be instruction or conversation: the format for dpo is not available yet"
        )
    return value


def _without_nul(text: str) -> str:
    """Refuse U+0000, which PostgreSQL cannot store. JSON bodies are checked as a whole; a form is not JSON."""
    if "\x00" in text:
        raise ValueError("must not hold the character U+0000")
    return text


# Only uploads: a list may be filtered by any format that there is.
UploadFormat = Annotated[
    DatasetFormat,
    BeforeValidator(_not_yet),
    Field(
        description="How a line holds its example; other fields are ignored and counted in `suggestions`.\n\n"
        "`instruction`: the texts `instruction` and `response`, not empty; optional texts `system` and `input`, an "
        "optional object `metadata`. Also read, and named in `suggestions`: `prompt`/`completion`, "
        "`question`/`answer`, `output`, `history`.\n\n"
        "`conversation`: `messages`, a list of `{role, content}` with the roles `system` (first, or before a turn of "
        "the user), `user`, `assistant` and `tool`; at least one turn of the user, and the last one by the assistant. "
        "Only turns of the assistant are learnt, but for those with `weight` 0. `tools`, `tool_calls` and "
        "`tool_call_id` are those of OpenAI's files; what is no such definition or call is refused (`invalid_tool`, "
        "`invalid_tool_call`). ShareGPT's `conversations`, and turns in `prompt` and `completion`, are read, too.\n\n"
        "Two layouts in one file are refused."
    ),
]
Description = Annotated[str, Field(max_length=4096), AfterValidator(_without_nul)]


class DatasetValidate(CreateRequest):
    """The form of validate, beside its `file`. `base_model` chooses the tokenizer that counts (additive).

    Its chat template then renders every example: a line that it refuses is an error.
    """

    format: UploadFormat
    base_model: ModelId | None = None


class DatasetUpload(CreateRequest):
    """The form of upload, beside its `file`. `tags` is JSON text; `base_model` chooses the tokenizer that counts."""

    name: Name
    format: UploadFormat
    description: Description = ""
    tags: Tags = Field(default_factory=dict)
    base_model: ModelId | None = None


class DatasetMerge(CreateRequest):
    """Datasets of one format, concatenated in the given order; nothing is dropped."""

    dataset_ids: Annotated[list[DatasetId], Field(min_length=2, max_length=100)]
    name: Name
    description: Description = ""
    tags: Tags = Field(default_factory=dict)


class TokenDistribution(Reply):
    """Tokens of the assistant's turns, and of all other turns. The template is not counted."""

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


class LineProblem(Reply):
    """One problem of a file: line from 1 (null: the whole file), field, code. It never quotes the text."""

    line: int | None
    field: str | None
    code: str
    message: str


class DatasetCreated(DatasetSummary):
    """A dataset in the reply to an upload or a combination. The counts of a big one are 0 until it is `processed`."""

    description: str = ""
    tokenizer: Annotated[
        str | None,
        Field(exclude_if=absent, description="Base model whose tokenizer counts (additive)."),
    ] = None
    duplicate_examples: Annotated[
        int | None,
        Field(
            exclude_if=absent,
            description="Examples of a combined dataset that repeat an earlier one; all are kept (additive).",
        ),
    ] = None
    suggestions: Annotated[
        list[str] | None,
        Field(
            exclude_if=absent,
            description="What validate would suggest: fields read by another name or ignored, and more (additive).",
        ),
    ] = None


class DatasetFailure(Reply):
    """Why a dataset failed after its upload was answered."""

    code: str
    message: str
    details: list[LineProblem] = Field(default_factory=list[LineProblem])


class Dataset(DatasetCreated):
    """A dataset in the reply to get."""

    token_distribution: TokenDistribution
    error: Annotated[DatasetFailure | None, Field(exclude_if=absent)] = None


class DatasetPage(Reply):
    """One page of datasets, newest first."""

    datasets: list[DatasetSummary]
    pagination: Pagination


class FormatDetails(Reply):
    """The format and the fields of the lines."""

    format: str
    has_instructions: bool
    has_responses: bool


class DatasetValidation(Reply):
    """The result of checking a file. A bad file is an answer, not an error."""

    is_valid: bool
    num_examples: int
    total_tokens: int
    token_distribution: TokenDistribution
    format_details: FormatDetails
    suggestions: list[str]
    # A file of a million lines may have as many faults: the lists hold the first, the counts all.
    errors: list[LineProblem] = Field(default_factory=list[LineProblem])
    warnings: list[LineProblem] = Field(default_factory=list[LineProblem])
    error_count: int = 0
    errors_truncated: bool = False
    warning_count: int = 0
    tokenizer: Annotated[str | None, Field(exclude_if=absent)] = None


# Examples of the OpenAPI document.
EXAMPLE_LINES = (
    '{"instruction": "Chronic eczema of both hands", "response": "Diseases of the skin"}\n'
    '{"instruction": "Senile cataract", "response": "Diseases of the eye"}\n'
)

EXAMPLE_TOKENS = {"prompt_tokens": 48_210, "response_tokens": 9_120}

EXAMPLE_SUMMARY = {
    "id": DATASET,
    "name": "icd chapters",
    "format": "instruction",
    "num_examples": 1500,
    "total_tokens": 57_330,
    "created_at": NOON,
    "status": "processed",
    "tags": TAGS,
}

EXAMPLE_DATASET = {
    **EXAMPLE_SUMMARY,
    "description": "Diagnosis texts with their chapter titles.",
    "tokenizer": BASE,
}


@operation(
    "POST",
    "/v1/datasets/validate",
    scope="datasets:read",
    errors=(ModelNotFound,),
    example=Example(
        {"instruction": {"format": "instruction", "file": EXAMPLE_LINES}},
        {
            "is_valid": False,
            "num_examples": 2,
            "total_tokens": 57,
            "token_distribution": {"prompt_tokens": 40, "response_tokens": 17},
            "format_details": {
                "format": "instruction",
                "has_instructions": True,
                "has_responses": True,
            },
            "suggestions": ["Give every line a non-empty response."],
            "errors": [
                {
                    "line": 3,
                    "field": "response",
                    "code": "empty_value",
                    "message": "must not be empty",
                }
            ],
            "warnings": [],
            "error_count": 1,
            "errors_truncated": False,
            "warning_count": 0,
            "tokenizer": BASE,
        },
    ),
)
def validate_dataset(form: DatasetValidate, file: BinaryIO) -> DatasetValidation:
    """Check a JSON Lines file without making a dataset of it (§4.2).

    The report comes when the whole file has been read.
    """
    raise NotImplementedError


@operation(
    "POST",
    "/v1/datasets",
    scope="datasets:write",
    status=201,
    errors=(DatasetError, ModelNotFound, QuotaExceeded),
    example=Example(
        {
            "instruction": {
                "name": "icd chapters",
                "format": "instruction",
                "tags": TAGS,
                "file": EXAMPLE_LINES,
            }
        },
        EXAMPLE_DATASET,
    ),
)
def upload_dataset(form: DatasetUpload, file: BinaryIO) -> DatasetCreated:
    """Store a JSON Lines file as a dataset (§4.2). A file with a bad line is refused whole.

    A big file (by default over 64 MiB) is answered as `processing`, with counts of 0, and checked afterwards: poll get
    until `processed` or `failed`; `error` then has the first 1,000 bad lines.

    A file may have 2 GiB, 5 million lines, and 8 MiB and 100,000 values a line, a field of the form 64 KiB. It must
    bring 64 KiB a second, on average over every 30 seconds. What is stored and what is being sent count against the
    quota of bytes.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/datasets/{dataset_id}",
    scope="datasets:read",
    example=Example(reply={**EXAMPLE_DATASET, "token_distribution": EXAMPLE_TOKENS}),
)
def get_dataset(dataset_id: DatasetId) -> Dataset:
    """Fetch one dataset (§4.2)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/datasets",
    scope="datasets:read",
    example=Example(reply={"datasets": [EXAMPLE_SUMMARY], "pagination": PAGE}),
)
def list_datasets(
    limit: Limit = 20,
    offset: Offset = 0,
    format: DatasetFormat | None = None,  # noqa: A002 - the description's name
    tags: Tags | None = None,
) -> DatasetPage:
    """List datasets, newest first (§4.2)."""
    raise NotImplementedError


@operation(
    "DELETE",
    "/v1/datasets/{dataset_id}",
    scope="datasets:write",
    errors=((DatasetError, 409),),
    example=Example(reply={"id": DATASET, "deleted": True}),
)
def delete_dataset(dataset_id: DatasetId) -> Deleted:
    """Remove a dataset and its file (§4.2); 409 while a job that has not ended uses it."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/datasets/merge",
    scope="datasets:write",
    status=201,
    errors=(
        ResourceNotFound,
        DatasetError,
        (DatasetError, 409),
        QuotaExceeded,
    ),
    example=Example(
        {"two": {"dataset_ids": [DATASET, OTHER_DATASET], "name": "both years"}},
        {
            **EXAMPLE_DATASET,
            "id": "ds_1q3w5e7r9t2y4u6i8o0p1a3s",
            "name": "both years",
            "description": "",
            "tags": {},
            "source_datasets": [DATASET, OTHER_DATASET],
            "duplicate_examples": 12,
        },
    ),
)
def merge_datasets(merge: DatasetMerge) -> DatasetCreated:
    """Combine datasets of one format in a new one (§4.2). Nothing is dropped; the sources may be deleted.

    The datasets must be different ones. Examples that repeat an earlier one are kept and counted in
    `duplicate_examples`.
    """
    raise NotImplementedError


class Datasets(Resource[C_co]):
    """Training data."""

    validate = UploadVerb[DatasetValidate, DatasetValidation](validate_dataset)
    upload = UploadVerb[DatasetUpload, DatasetCreated](upload_dataset)
    get = Verb(get_dataset)
    list = Verb(list_datasets)
    iterate = Pages(list_datasets, lambda page: page.datasets)
    merge = Verb(merge_datasets)
    delete = Verb(delete_dataset)
