"""Runs of OpenAI's evals: a model answers the rows of a file, and the criteria of the eval score the answers."""

from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, Field, model_validator

from tuneship.contract.common import EvalId, EvaluationId, Reply
from tuneship.contract.declaring.examples import EVALUATION, MODEL, SUFFIX
from tuneship.contract.declaring.operation import Example
from tuneship.contract.generation import MAXIMUM_TURNS
from tuneship.contract.openai.answer_parts import AskedModel, text_of_parts
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.eval_templates import field_named, of_rows
from tuneship.contract.openai.evals import EXAMPLE_EVAL, EvalName, OfferedType, Order
from tuneship.contract.openai.ids import FileId
from tuneship.contract.openai.lists import AfterId, ListedObject, ObjectPage, PageSize
from tuneship.contract.openai.request_fields import NeutralFields, OpenAIRequest
from tuneship.contract.openai.responses import InputMessage, Metadata
from tuneship.contract.openai.tool_choices import check_fields

# Rows of one run; a body has room for about a thousand, a file for all of them.
MAXIMUM_ROWS = 100_000
MAXIMUM_ANSWER_TOKENS = 4096
TEXT_ONLY = {"type": "text"}

RunStatus = Literal["queued", "in_progress", "completed", "canceled", "failed"]
ItemOutcome = Literal["pass", "fail"]
OutputItemId = Annotated[str, Field(max_length=64)]


class SentRow(OpenAIRequest):
    """One row."""

    neutral: ClassVar[NeutralFields] = {"sample": ({},)}

    item: dict[str, Any]


class RunSource(OfferedType):
    """The rows: in the request, or in a file of the purpose `evals`, an object `{"item": {...}}` a line."""

    refused_types = ("stored_completions", "responses")

    type: Literal["file_content", "file_id"]
    content: Annotated[list[SentRow] | None, Field(min_length=1)] = None
    id: Annotated[FileId | None, Field(min_length=1, max_length=128)] = None

    @model_validator(mode="after")
    def _fields_of_its_type(self) -> Self:
        check_fields(self, {"file_content": ("content",), "file_id": ("id",)})
        return self


class TemplateMessage(InputMessage):
    """One turn of the prompt, whose text may name `{{item.<field>}}`."""

    @model_validator(mode="before")
    @classmethod
    def _as_parts(cls, value: Any) -> Any:
        """One part may stand alone, and a text in place of a part."""
        fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        content: Any = fields.get("content")
        if isinstance(content, dict):
            content = [content]
        if not isinstance(content, list):
            return cast("Any", value)
        parts = [
            {"type": "input_text", "text": part} if isinstance(part, str) else part
            for part in cast("list[Any]", content)
        ]
        return {**fields, "content": parts}

    @model_validator(mode="after")
    def _names_rows_alone(self) -> Self:
        of_rows(text_of_parts(self.content))
        return self


def _of_a_row(reference: str) -> str:
    field_named(reference)
    return reference


class InputMessages(OpenAIRequest):
    """The prompt: turns with templates, or the field of a row that has the turns."""

    type: Literal["template", "item_reference"]
    template: Annotated[
        list[TemplateMessage] | None, Field(min_length=1, max_length=MAXIMUM_TURNS)
    ] = None
    item_reference: Annotated[str, AfterValidator(_of_a_row)] | None = None

    @model_validator(mode="after")
    def _fields_of_its_type(self) -> Self:
        check_fields(self, {"template": ("template",), "item_reference": ("item_reference",)})
        return self

    @property
    def turns(self) -> list[dict[str, str]] | str:
        """The turns with their templates, or the name of the field that has the turns."""
        if self.item_reference is not None:
            return field_named(self.item_reference)
        return [one.turn for one in self.template or ()]


class SamplingParams(OpenAIRequest):
    """The sampling of answers; without a temperature they are greedy, and always the same."""

    neutral: ClassVar[NeutralFields] = {
        "reasoning_effort": ("none",),
        "response_format": (TEXT_ONLY,),
        "text": ({}, {"format": TEXT_ONLY}),
        "tools": ([],),
    }

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: int | None = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=MAXIMUM_ANSWER_TOKENS)] = None


class RunDataSource(OfferedType):
    """The model that is asked, the rows, and the prompt that is made of each of them."""

    refused_types = ("jsonl",)

    type: Literal["completions", "responses"]
    model: AskedModel
    source: RunSource
    input_messages: InputMessages
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)


class EvalRunCreate(OpenAIRequest):
    """A run of an eval."""

    name: EvalName | None = None
    metadata: Metadata | None = None
    data_source: RunDataSource


class RunError(Reply):
    """The reason why a run failed, or why a row has no score."""

    code: str
    message: str


class ResultCounts(Reply):
    """Rows whose answers are scored; one passes where it passes every criterion. `errored` ones have no score."""

    total: int
    passed: int
    failed: int
    errored: int


class CriterionResult(Reply):
    """The rows that passed one criterion, which is named as in its eval, and those that failed it."""

    testing_criteria: str
    passed: int
    failed: int


class ModelUsage(Reply):
    """The requests to a model, and the tokens that they took."""

    model_name: str
    invocation_count: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Literal[0] = 0
    total_tokens: int


class EvalRun(ListedObject):
    """A run. `data_source` is as it was sent, but for rows and prompt, which are not shown."""

    id: Annotated[str, Field(description="The evaluation of the main API.")]
    object: Literal["eval.run"] = "eval.run"
    eval_id: str
    name: str
    status: RunStatus
    model: str
    created_at: int
    report_url: Annotated[str, Field(description="The evaluation's path on the main API.")]
    data_source: dict[str, Any]
    result_counts: ResultCounts
    per_model_usage: list[ModelUsage]
    per_testing_criteria_results: list[CriterionResult]
    error: RunError | None
    metadata: dict[str, str] | None


class EvalRuns(ObjectPage[EvalRun]):
    """A page of runs."""


class EvalRunDeleted(Reply):
    """The answer to a delete."""

    object: Literal["eval.run.deleted"] = "eval.run.deleted"
    run_id: str
    deleted: Literal[True] = True


class ItemResult(Reply):
    """The score of one criterion: 1 if it passes, else 0."""

    name: str
    type: str
    passed: bool
    score: float
    sample: None = None


class ItemSample(Reply):
    """The sampling of an answer. Neither it nor its prompt is stored, and so both are empty."""

    model: str
    input: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list[Any])
    output: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list[Any])
    temperature: float
    top_p: float | None
    seed: int | None
    max_completion_tokens: int
    finish_reason: None = None
    usage: None = None
    error: RunError | None


class OutputItem(ListedObject):
    """The scores of one row. Rows cannot be read back, and so `datasource_item` is empty."""

    object: Literal["eval.run.output_item"] = "eval.run.output_item"
    eval_id: str
    run_id: str
    created_at: int
    status: Literal["pass", "fail", "error"]
    datasource_item_id: Annotated[int, Field(description="The number of the row, from 0.")]
    datasource_item: dict[str, Any] = Field(default_factory=dict[str, Any])
    results: list[ItemResult]
    sample: ItemSample


class OutputItems(ObjectPage[OutputItem]):
    """A page of output items."""


EXAMPLE_SAMPLING = {"temperature": 0.0, "max_completion_tokens": 16}
EXAMPLE_RUN: dict[str, Any] = {
    "id": EVALUATION,
    "object": "eval.run",
    "eval_id": EXAMPLE_EVAL["id"],
    "name": "November",
    "status": "completed",
    "model": MODEL,
    "created_at": 1_772_366_400,
    "report_url": f"/v1/evaluations/{EVALUATION}",
    "data_source": {
        "type": "completions",
        "model": MODEL,
        "source": {"type": "file_id", "id": f"file-{SUFFIX}"},
        "sampling_params": EXAMPLE_SAMPLING,
    },
    "result_counts": {"total": 3, "passed": 2, "failed": 1, "errored": 0},
    "per_model_usage": [
        {
            "model_name": MODEL,
            "invocation_count": 3,
            "prompt_tokens": 61,
            "completion_tokens": 12,
            "cached_tokens": 0,
            "total_tokens": 73,
        }
    ],
    "per_testing_criteria_results": [
        {"testing_criteria": "Same chapter", "passed": 2, "failed": 1}
    ],
    "error": None,
    "metadata": {"site": "A"},
}
EXAMPLE_ITEM: dict[str, Any] = {
    "id": f"outputitem_{SUFFIX}-0",
    "object": "eval.run.output_item",
    "eval_id": EXAMPLE_EVAL["id"],
    "run_id": EVALUATION,
    "created_at": 1_772_366_400,
    "status": "pass",
    "datasource_item_id": 2,
    "datasource_item": {},
    "results": [
        {
            "name": "Same chapter",
            "type": "string_check",
            "passed": True,
            "score": 1.0,
            "sample": None,
        }
    ],
    "sample": {
        "model": MODEL,
        "input": [],
        "output": [],
        "temperature": 0.0,
        "top_p": None,
        "seed": None,
        "max_completion_tokens": 16,
        "finish_reason": None,
        "usage": None,
        "error": None,
    },
}


def _page_of(example: dict[str, Any]) -> dict[str, Any]:
    ends = {"first_id": example["id"], "last_id": example["id"], "has_more": False}
    return {"object": "list", "data": [example], **ends}


@openai_operation(
    "POST",
    "evals/{eval_id}/runs",
    scope="evaluations:write",
    changes=True,
    example=Example(
        {
            "rows of a file": {
                "name": "November",
                "data_source": {
                    "type": "completions",
                    "model": MODEL,
                    "source": {"type": "file_id", "id": f"file-{SUFFIX}"},
                    "input_messages": {
                        "type": "template",
                        "template": [{"role": "user", "content": "{{item.diagnosis}}"}],
                    },
                    "sampling_params": EXAMPLE_SAMPLING,
                },
                "metadata": {"site": "A"},
            }
        },
        EXAMPLE_RUN,
    ),
)
def openai_create_eval_run(eval_id: EvalId, run: EvalRunCreate) -> EvalRun:
    """Ask a model every row in the background, after all other requests, and score its answers."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "evals/{eval_id}/runs",
    scope="evaluations:read",
    example=Example(reply=_page_of(EXAMPLE_RUN)),
)
def openai_list_eval_runs(
    eval_id: EvalId,
    after: AfterId | None = None,
    limit: PageSize = 20,
    order: Order = "asc",
    status: RunStatus | None = None,
) -> EvalRuns:
    """List the runs of an eval, oldest first."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "evals/{eval_id}/runs/{run_id}",
    scope="evaluations:read",
    example=Example(reply=EXAMPLE_RUN),
)
def openai_get_eval_run(eval_id: EvalId, run_id: EvaluationId) -> EvalRun:
    """Fetch one run with what it has found so far."""
    raise NotImplementedError


@openai_operation(
    "POST",
    "evals/{eval_id}/runs/{run_id}/cancel",
    scope="evaluations:write",
    changes=True,
    example=Example(reply={**EXAMPLE_RUN, "status": "canceled"}),
)
def openai_cancel_eval_run(eval_id: EvalId, run_id: EvaluationId) -> EvalRun:
    """End a run; the scores that are stored stay."""
    raise NotImplementedError


@openai_operation(
    "DELETE",
    "evals/{eval_id}/runs/{run_id}",
    scope="evaluations:write",
    changes=True,
    example=Example(reply={"object": "eval.run.deleted", "run_id": EVALUATION, "deleted": True}),
)
def openai_delete_eval_run(eval_id: EvalId, run_id: EvaluationId) -> EvalRunDeleted:
    """Remove an ended run with its scores and its rows; 409 while it runs."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "evals/{eval_id}/runs/{run_id}/output_items",
    scope="evaluations:read",
    example=Example(reply=_page_of(EXAMPLE_ITEM)),
)
def openai_list_output_items(
    eval_id: EvalId,
    run_id: EvaluationId,
    after: AfterId | None = None,
    limit: PageSize = 20,
    order: Order = "asc",
    status: ItemOutcome | None = None,
) -> OutputItems:
    """List the scores of each row, without a text, in the order in which they were asked."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "evals/{eval_id}/runs/{run_id}/output_items/{output_item_id}",
    scope="evaluations:read",
    example=Example(reply=EXAMPLE_ITEM),
)
def openai_get_output_item(
    eval_id: EvalId, run_id: EvaluationId, output_item_id: OutputItemId
) -> OutputItem:
    """Fetch the scores of one row."""
    raise NotImplementedError
