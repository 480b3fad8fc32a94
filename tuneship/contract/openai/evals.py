"""Evals of OpenAI's API: the form of rows, and the criteria by which answers to them are scored."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import ONE_LINE, EvalId, Reply, absent
from tuneship.contract.declaring.examples import SUFFIX
from tuneship.contract.declaring.operation import Example
from tuneship.contract.graders import MAXIMUM_GRADERS, UNBUILT_METRICS, UNBUILT_TYPES, Operation
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.eval_templates import (
    CriterionTemplate,
    fields_of,
    grader_template,
    key_of,
)
from tuneship.contract.openai.lists import AfterId, ListedObject, ObjectPage, PageSize
from tuneship.contract.openai.request_fields import OpenAIRequest
from tuneship.contract.openai.responses import Metadata
from tuneship.contract.openai.tool_choices import check_fields

EvalName = Annotated[str, Field(min_length=1, max_length=128, pattern=ONE_LINE)]
Order = Literal["asc", "desc"]


class OfferedType(OpenAIRequest):
    """A part of a request whose type says which fields it has."""

    # OpenAI's other types, which are refused by their names.
    refused_types: ClassVar[Sequence[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _of_an_offered_type(cls, value: Any) -> Any:
        kind = cast("dict[str, Any]", value).get("type") if isinstance(value, dict) else None
        if kind in cls.refused_types:
            text = f"cannot be {kind}, which is not offered here"
            raise PydanticCustomError("unsupported_value", cast("Any", text), {"below": ".type"})
        return cast("Any", value)


class EvalDataSource(OfferedType):
    """The form of the rows, as a JSON Schema of an item."""

    refused_types = ("logs", "stored_completions")

    type: Literal["custom"]
    item_schema: dict[str, Any]
    include_sample_schema: bool = False


class EvalCriterion(OfferedType):
    """A grader: a comparison of two texts, or how similar they are. Templates name `item.<field>` and the answer."""

    refused_types = UNBUILT_TYPES

    type: Literal["string_check", "text_similarity"]
    name: EvalName
    input: CriterionTemplate
    reference: CriterionTemplate
    operation: Annotated[Operation | None, Field(exclude_if=absent)] = None
    evaluation_metric: Annotated[
        Literal["fuzzy_match", "rouge_l"] | None, Field(exclude_if=absent)
    ] = None
    pass_threshold: Annotated[float | None, Field(ge=0, le=1, exclude_if=absent)] = None

    @model_validator(mode="before")
    @classmethod
    def _of_an_offered_metric(cls, value: Any) -> Any:
        metric: object = (
            cast("dict[str, Any]", value).get("evaluation_metric")
            if isinstance(value, dict)
            else None
        )
        if isinstance(metric, str) and metric in UNBUILT_METRICS:
            text = f"cannot be {metric}, which {UNBUILT_METRICS[metric]}"
            place = {"below": ".evaluation_metric"}
            raise PydanticCustomError("unsupported_value", cast("Any", text), place)
        return cast("Any", value)

    @model_validator(mode="after")
    def _fields_of_its_type(self) -> Self:
        similarity = ("evaluation_metric", "pass_threshold")
        check_fields(self, {"string_check": ("operation",), "text_similarity": similarity})
        return self

    @property
    def templates(self) -> tuple[str, str]:
        """Its templates, the reference last."""
        return self.input, self.reference


def graders_of(criteria: Sequence[EvalCriterion]) -> list[dict[str, Any]]:
    """The criteria as graders of an evaluation, in their order: names are made of letters, digits and `._-`."""
    made: list[dict[str, Any]] = []
    for number, one in enumerate(criteria, 1):
        letters = "".join(
            c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in one.name
        )
        grader: dict[str, Any] = {
            "name": f"{number}-{letters}"[:64],
            "type": one.type,
            "input": grader_template(one.input),
            "reference": grader_template(one.reference),
        }
        if one.type == "string_check":
            # Texts are compared as they are, as at OpenAI.
            grader |= {"operation": one.operation, "normalize": "none"}
        else:
            threshold = one.pass_threshold
            grader |= {"evaluation_metric": one.evaluation_metric, "pass_threshold": threshold}
        made.append(grader)
    return made


class EvalCreate(OpenAIRequest):
    """The form of rows, and the criteria by which answers to them are scored."""

    name: EvalName | None = None
    metadata: Metadata | None = None
    data_source_config: EvalDataSource
    testing_criteria: Annotated[
        list[EvalCriterion], Field(min_length=1, max_length=MAXIMUM_GRADERS)
    ]

    @model_validator(mode="after")
    def _names_that_are_known(self) -> Self:
        """Refuse names that the schema lacks, as OpenAI does, and names that occur twice."""
        properties: object = self.data_source_config.item_schema.get("properties")
        seen: dict[str, str] = {}
        for number, one in enumerate(self.testing_criteria):
            place = f"testing_criteria[{number}]"
            if any(one.name == other.name for other in self.testing_criteria[:number]):
                _refuse(f"{place}.name", "is the name of an earlier criterion")
            for part, template in zip(("input", "reference"), one.templates, strict=True):
                for field in fields_of(template):
                    top = field.partition(".")[0]
                    if isinstance(properties, Mapping) and properties and top not in properties:
                        _refuse(f"{place}.{part}", "names a field that item_schema lacks")
                    if seen.setdefault(key_of(field), field) != field:
                        _refuse(f"{place}.{part}", "names a field that differs by a dot alone")
        return self


def _refuse(param: str, text: str) -> None:
    raise PydanticCustomError("invalid_value", cast("Any", text), {"param": param})


class EvalUpdate(OpenAIRequest):
    """The fields of an eval that may change."""

    name: EvalName | None = None
    metadata: Metadata | None = None


class EvalRowsForm(Reply):
    """The form of the rows; `schema` has the item's as the property `item`."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["custom"] = "custom"
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class EvalObject(ListedObject):
    """An eval. Without a name, its name is empty."""

    object: Literal["eval"] = "eval"
    name: str
    created_at: int
    data_source_config: EvalRowsForm
    testing_criteria: list[EvalCriterion]
    metadata: dict[str, str] | None


class EvalObjects(ObjectPage[EvalObject]):
    """A page of evals."""


class EvalDeleted(Reply):
    """The answer to a delete."""

    object: Literal["eval.deleted"] = "eval.deleted"
    eval_id: str
    deleted: Literal[True] = True


EXAMPLE_CRITERION: dict[str, Any] = {
    "type": "string_check",
    "name": "Same chapter",
    "input": "{{sample.output_text}}",
    "reference": "{{item.chapter}}",
    "operation": "eq",
}
EXAMPLE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"diagnosis": {"type": "string"}, "chapter": {"type": "string"}},
    "required": ["diagnosis", "chapter"],
}
EXAMPLE_EVAL: dict[str, Any] = {
    "id": f"eval_{SUFFIX}",
    "object": "eval",
    "name": "Chapters",
    "created_at": 1_772_366_400,
    "data_source_config": {
        "type": "custom",
        "schema": {
            "type": "object",
            "properties": {"item": EXAMPLE_SCHEMA},
            "required": ["item"],
        },
    },
    "testing_criteria": [EXAMPLE_CRITERION],
    "metadata": {"site": "A"},
}


@openai_operation(
    "POST",
    "evals",
    scope="evaluations:write",
    changes=True,
    example=Example(
        {
            "chapters": {
                "name": "Chapters",
                "data_source_config": {
                    "type": "custom",
                    "item_schema": EXAMPLE_SCHEMA,
                    "include_sample_schema": True,
                },
                "testing_criteria": [EXAMPLE_CRITERION],
                "metadata": {"site": "A"},
            }
        },
        EXAMPLE_EVAL,
    ),
)
def openai_create_eval(eval: EvalCreate) -> EvalObject:  # noqa: A002 - OpenAI's word
    """Keep the form of rows and the criteria; its runs ask models."""
    raise NotImplementedError


@openai_operation(
    "GET",
    "evals",
    scope="evaluations:read",
    example=Example(
        reply={
            "object": "list",
            "data": [EXAMPLE_EVAL],
            "first_id": EXAMPLE_EVAL["id"],
            "last_id": EXAMPLE_EVAL["id"],
            "has_more": False,
        }
    ),
)
def openai_list_evals(
    after: AfterId | None = None,
    limit: PageSize = 20,
    order: Order = "asc",
    order_by: Literal["created_at"] = "created_at",
) -> EvalObjects:
    """List evals, oldest first."""
    raise NotImplementedError


@openai_operation(
    "GET", "evals/{eval_id}", scope="evaluations:read", example=Example(reply=EXAMPLE_EVAL)
)
def openai_get_eval(eval_id: EvalId) -> EvalObject:
    """Fetch one eval."""
    raise NotImplementedError


@openai_operation(
    "POST",
    "evals/{eval_id}",
    scope="evaluations:write",
    changes=True,
    example=Example({"rename": {"name": "Chapters"}}, EXAMPLE_EVAL),
)
def openai_update_eval(eval_id: EvalId, update: EvalUpdate) -> EvalObject:
    """Change the name or the metadata of an eval."""
    raise NotImplementedError


@openai_operation(
    "DELETE",
    "evals/{eval_id}",
    scope="evaluations:write",
    changes=True,
    example=Example(
        reply={"object": "eval.deleted", "eval_id": EXAMPLE_EVAL["id"], "deleted": True}
    ),
)
def openai_delete_eval(eval_id: EvalId) -> EvalDeleted:
    """Remove an eval with its runs and their rows; 409 while a run has not ended."""
    raise NotImplementedError
