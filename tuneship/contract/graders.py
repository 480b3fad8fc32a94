"""Graders of an evaluation: how an answer gets a score, in the spelling of OpenAI's where OpenAI has one. Pure.

Patterns and schemas are checked where they are compiled, in `tuneship/evaluation/graders.py`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, LiteralString, Self, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tuneship.contract.common import CreateRequest
from tuneship.contract.templates import Part, template_parts

MAXIMUM_GRADERS = 8
MAXIMUM_GATING = 4
MAXIMUM_FIELDS = 64
ANSWER = "{{sample.output_text}}"
REFERENCE = "{{item.reference}}"
# OpenAI's graders and measures that are not built, with the reason.
UNBUILT_TYPES = ("label_model", "score_model", "multi", "python")
UNBUILT_METRICS = {
    "bleu": "means little for one answer",
    "gleu": "means little for one answer",
    "meteor": "needs word lists of one language",
    "cosine": "needs vectors that are made for it",
    **dict.fromkeys([f"rouge_{n}" for n in range(1, 6)], "is not built; rouge_l is"),
}
KINDS = (
    "string_check",
    "text_similarity",
    "regex",
    "number",
    "json",
    "tool_calls",
    "choice",
    "loss",
)
_NAME = re.compile(
    r"sample\.output_text|item\.reference|item\.metadata\.(?P<field>[A-Za-z0-9_-]{1,64})"
)
_KNOWN_NAMES = "sample.output_text, item.reference and item.metadata.<field>"


def grader_parts(template: str) -> list[Part]:
    """The parts of a grader's template. Raises ValueError."""
    return template_parts(template, _NAME, _KNOWN_NAMES)


def metadata_field(name: str) -> str | None:
    """The metadata field that a variable of a template refers to, or None."""
    found = _NAME.fullmatch(name)
    return found and found["field"]


def _template(text: str) -> str:
    grader_parts(text)
    return text


def _known(known: Sequence[str], unbuilt: Callable[[str], str | None]) -> BeforeValidator:
    def check(value: object) -> object:
        if value in known:
            return value
        why = unbuilt(value) if isinstance(value, str) else None
        text = f"cannot be {value}, which {why}" if why else f"must be one of {', '.join(known)}"
        raise PydanticCustomError(
            "unsupported_value" if why else "invalid_value", cast("LiteralString", text)
        )

    return BeforeValidator(check)


Template = Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(_template)]
Input = Annotated[
    Template, Field(description="Template of the graded text; by default the answer.")
]
Reference = Annotated[
    Template,
    Field(
        description="Template of the right text; by default the last assistant turn of the line."
    ),
]
GraderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Share = Annotated[float, Field(ge=0, le=1)]
PassThreshold = Annotated[
    Share | None,
    Field(
        description="A score from here on counts 1 and any other 0; a grader that decides needs it."
    ),
]
Metrics = Literal["rouge_l", "fuzzy_match", "token_f1", "chrf"]
Operation = Literal["eq", "ne", "like", "ilike"]


class _Grader(CreateRequest):
    name: GraderName

    @property
    def is_graded(self) -> bool:
        """Whether other scores than 0 and 1 come out."""
        return False


class StringCheckGrader(_Grader):
    """1 if the answer equals the reference (`eq`), does not (`ne`), or contains it (`like`; `ilike` in any case)."""

    type: Literal["string_check"]
    operation: Operation = "eq"
    normalize: Annotated[
        Literal["none", "space", "text"],
        Field(
            description="`space` takes white space as one space and none at the ends; `text` also leaves out case, "
            "punctuation and forms of the same character (NFKC)."
        ),
    ] = "space"
    input: Input = ANSWER
    reference: Reference = REFERENCE


class TextSimilarityGrader(_Grader):
    """How similar the answer is to the reference, from 0 to 1."""

    type: Literal["text_similarity"]
    evaluation_metric: Annotated[
        Metrics, _known(("rouge_l", "fuzzy_match", "token_f1", "chrf"), UNBUILT_METRICS.get)
    ]
    pass_threshold: PassThreshold = None
    input: Input = ANSWER
    reference: Reference = REFERENCE

    @property
    def is_graded(self) -> bool:
        """Whether no threshold makes 0 or 1 of the similarity."""
        return self.pass_threshold is None


class RegexGrader(_Grader):
    """1 if the pattern is found in the answer; of a pattern with groups, if the first equals the reference."""

    type: Literal["regex"]
    pattern: Annotated[str, Field(min_length=1, max_length=1_000)]
    input: Input = ANSWER
    reference: Reference = REFERENCE


class NumberGrader(_Grader):
    """1 if the last number of the answer is that of the reference, within `tolerance` or a share `relative` of it."""

    type: Literal["number"]
    tolerance: Annotated[float, Field(ge=0)] = 0.0
    relative: Annotated[float, Field(ge=0, le=1)] = 0.0
    input: Input = ANSWER
    reference: Reference = REFERENCE


class JsonGrader(_Grader):
    """1 if the answer is JSON and fits the schema; with `fields`, the share of them that equal the reference's."""

    type: Literal["json"]
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    fields: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128)]] | None,
        Field(min_length=1, max_length=MAXIMUM_FIELDS),
    ] = None
    pass_threshold: PassThreshold = None
    input: Input = ANSWER
    reference: Reference = REFERENCE

    @model_validator(mode="after")
    def _threshold_of_shares(self) -> Self:
        if self.pass_threshold is not None and self.fields is None:
            raise PydanticCustomError("conflict", "needs fields", {"below": ".pass_threshold"})
        return self

    @property
    def is_graded(self) -> bool:
        """Whether the share of equal fields is the score, without a threshold."""
        return self.fields is not None and self.pass_threshold is None


class ToolCallsGrader(_Grader):
    """1 if the answer calls the same functions as the reference with equal arguments, in any order."""

    type: Literal["tool_calls"]


class ChoiceGrader(_Grader):
    """1 if the model finds the reference likelier than each other text of the line's `metadata.choices`.

    Compared are the summed log probabilities of the tokens of an answer and its end. Nothing is generated.
    """

    type: Literal["choice"]


class LossGrader(_Grader):
    """The model's loss on the reference, in nats a target token; lower is better. Nothing is generated.

    It is what a training reports as the row's validation loss, is no share, and decides nothing.
    """

    type: Literal["loss"]

    @property
    def is_graded(self) -> bool:
        """Always: a loss has no upper bound."""
        return True


def _built(sent: Any) -> Any:
    """Refuse a type that is not built, by its name if OpenAI has it."""
    fields = cast("dict[str, Any]", sent) if isinstance(sent, dict) else {}
    kind: object = fields.get("type")
    if not isinstance(sent, dict) or kind in KINDS:
        return cast("Any", sent)
    if "type" not in fields:
        raise PydanticCustomError("missing", "Field required", {"below": ".type"})
    is_known = kind in UNBUILT_TYPES
    text = (
        f"cannot be {kind}, which is not built"
        if is_known
        else f"must be one of {', '.join(KINDS)}"
    )
    code = "unsupported_value" if is_known else "invalid_value"
    raise PydanticCustomError(code, text, {"below": ".type"})


def _kind(sent: Any) -> str:
    # A grader that was read before is an object; anything else is refused as no object.
    if isinstance(sent, dict):
        return f"~{cast('dict[str, Any]', sent).get('type')}"
    return f"~{getattr(sent, 'type', KINDS[0])}"


# The kind is chosen before a grader is read; names of branches that begin so are left out of the places in refusals.
Grader = Annotated[
    Annotated[StringCheckGrader, Tag("~string_check")]
    | Annotated[TextSimilarityGrader, Tag("~text_similarity")]
    | Annotated[RegexGrader, Tag("~regex")]
    | Annotated[NumberGrader, Tag("~number")]
    | Annotated[JsonGrader, Tag("~json")]
    | Annotated[ToolCallsGrader, Tag("~tool_calls")]
    | Annotated[ChoiceGrader, Tag("~choice")]
    | Annotated[LossGrader, Tag("~loss")],
    Discriminator(_kind),
    BeforeValidator(_built),
]


def _different_names(graders: list[Grader]) -> list[Grader]:
    names = [one.name for one in graders]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise _refusal("is the name of an earlier grader", f"[{number}].name")
    return graders


Graders = Annotated[
    list[Grader],
    Field(min_length=1, max_length=MAXIMUM_GRADERS),
    AfterValidator(_different_names),
]


def gating_names(graders: Sequence[Grader], gating: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the graders that decide, by default the first. Raises pydantic's error, with the place below gating.

    Their scores must be 0 or 1: of rare large losses among small gains, a test of graded scores keeps no level.
    """
    by_name = {one.name: one for one in graders}
    names = tuple(list(by_name)[:1] if gating is None else gating)
    if not 1 <= len(names) <= MAXIMUM_GATING or len(set(names)) < len(names):
        raise _refusal(f"must have 1 to {MAXIMUM_GATING} different names")
    for number, name in enumerate(names):
        if name not in by_name:
            raise _refusal("is the name of no grader", f"[{number}]")
        if by_name[name].type == "loss":
            raise _refusal("is a loss, which is reported and decides nothing", f"[{number}]")
        if by_name[name].is_graded:
            raise _refusal("is a grader of shares, and needs pass_threshold", f"[{number}]")
    return names


def _refusal(message: str, below: str = "") -> PydanticCustomError:
    return PydanticCustomError("invalid_value", cast("LiteralString", message), {"below": below})
