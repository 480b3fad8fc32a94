"""Files of OpenAI's API: training data, which are datasets, results of jobs, made when they are read, and batches."""

from typing import Annotated, Any, BinaryIO, Literal, cast

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from tuneship.contract.common import Reply
from tuneship.contract.declaring.examples import SUFFIX
from tuneship.contract.declaring.operation import Example
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.ids import FileId
from tuneship.contract.openai.lists import AfterId
from tuneship.contract.openai.request_fields import OpenAIRequest

FilePurpose = Literal["fine-tune", "fine-tune-results", "batch", "batch_output", "evals"]


class FileUpload(OpenAIRequest):
    """The form of an upload, beside its `file`: training data, requests of a batch, or rows of an eval."""

    unsupported = frozenset({"expires_after"})

    purpose: Literal["fine-tune", "batch", "evals"]
    # The name in the head of the file's part; no part of its own.
    filename: SkipJsonSchema[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _without_brackets(cls, value: Any) -> Any:
        # A form has one part for each member of an object: `expires_after[anchor]`.
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        return {name.partition("[")[0]: one for name, one in fields.items()}


class FileObject(Reply):
    """A file. `bytes` are those of its content."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: FilePurpose
    status: Literal["uploaded", "processed", "error"]
    status_details: str | None = None
    expires_at: None = None


class FileObjects(Reply):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    has_more: bool


class FileDeleted(Reply):
    """The answer to a delete."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


EXAMPLE_FILE: dict[str, Any] = {
    "id": f"file-{SUFFIX}",
    "object": "file",
    "bytes": 140,
    "created_at": 1_772_366_400,
    "filename": "train.jsonl",
    "purpose": "fine-tune",
    "status": "processed",
    "status_details": None,
    "expires_at": None,
}
EXAMPLE_LINE = (
    '{"messages": [{"role": "user", "content": "Senile cataract"}, '
    '{"role": "assistant", "content": "Diseases of the eye"}]}\n'
)


@openai_operation(
    "POST",
    "files",
    scope="datasets:write",
    changes=True,
    example=Example({"training": {"purpose": "fine-tune", "file": EXAMPLE_LINE}}, EXAMPLE_FILE),
)
def openai_create_file(form: FileUpload, file: BinaryIO) -> FileObject:
    """Store JSON Lines: training data as a dataset, refused whole for a bad line; or for a batch or an eval."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "files",
    scope="datasets:read",
    example=Example(reply={"object": "list", "data": [EXAMPLE_FILE], "has_more": False}),
)
def openai_list_files(
    after: AfterId | None = None,
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: FilePurpose = "fine-tune",
) -> FileObjects:
    """List files of one purpose, newest first.

    Results of jobs need the scope `jobs:read` as well; a page of them has at most 100.
    """
    raise NotImplementedError


@openai_operation(
    "GET", "files/{file_id}", scope="datasets:read", example=Example(reply=EXAMPLE_FILE)
)
def openai_get_file(file_id: FileId) -> FileObject:
    """Fetch one file; the result file of a job with the scope `jobs:read` as well."""
    raise NotImplementedError


@openai_operation(
    "DELETE",
    "files/{file_id}",
    scope="datasets:write",
    changes=True,
    example=Example(reply={"id": f"file-{SUFFIX}", "object": "file", "deleted": True}),
)
def openai_delete_file(file_id: FileId) -> FileDeleted:
    """Remove a file; 409 while a job or a batch that has not ended uses it."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "files/{file_id}/content",
    scope="metrics:read",
    example=Example(reply="c3RlcCx0cmFpbl9sb3Nz"),
)
def openai_get_file_content(file_id: FileId) -> str:
    """Read the result file of a job, CSV in Base64, or what a batch has answered, with the scope `generate` as well.

    Neither training data nor the requests of a batch or the rows of an eval can be read back.
    """
    raise NotImplementedError
