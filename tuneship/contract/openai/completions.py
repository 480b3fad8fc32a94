"""Completions of OpenAI's API: texts or token ids that a model continues as they are, without a chat template."""

from typing import Annotated, ClassVar, Literal, LiteralString, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import Reply, absent
from tuneship.contract.declaring.examples import MODEL, SUFFIX
from tuneship.contract.declaring.operation import Example
from tuneship.contract.generation import MAXIMUM_ANSWERS
from tuneship.contract.openai.answer_parts import (
    PENALTIES,
    Answered,
    CompletionUsage,
    FinishReason,
    SampledRequest,
)
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.request_fields import NeutralFields
from tuneship.contract.token_inputs import TextOrIds, schema_of_texts, texts_or_ids


class TextCompletionCreate(SampledRequest):
    """Texts for a model to continue."""

    neutral: ClassVar[NeutralFields] = {**PENALTIES, "best_of": (1,)}
    unsupported = frozenset({"suffix"})

    prompt: Annotated[
        list[TextOrIds],
        PlainValidator(lambda value: texts_or_ids(value, "prompt")),
        WithJsonSchema(
            schema_of_texts(
                MAXIMUM_ANSWERS,
                "One prompt or several, as texts or token ids. No template is added.",
            )
        ),
    ]
    max_tokens: Annotated[
        int, Field(ge=0, description="0, which writes nothing, goes with `echo`.")
    ] = 16
    echo: Annotated[bool, Field(description="Begin each text with its prompt.")] = False
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        def refuse(name: str, message: LiteralString) -> None:
            raise PydanticCustomError("conflict", message, {"param": name})

        if len(self.prompt) * self.n > MAXIMUM_ANSWERS:
            refuse("prompt", "asks for too many answers: at most 64 prompts times n")
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens", "may be 0 only with echo")
        if self.echo and self.stream:
            refuse("echo", "is not supported in a stream")
        return self


class TextLogprobs(Reply):
    """Log probabilities of the tokens of a text, in lists of the same length.

    With `echo` the first token has none. The token that ended an answer is the last entry, though not part of the text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Reply):
    """One answer, or a piece of it."""

    index: int = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextCompletion(Answered):
    """An answer to a text, or one piece of a streamed answer."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Annotated[CompletionUsage | None, Field(exclude_if=absent)] = None


class CountedTextPiece(TextCompletion):
    """One piece of a streamed answer with `include_usage`; the last one has no choices but the usage."""

    usage: CompletionUsage | None = None


@openai_operation(
    "POST",
    "completions",
    scope="generate",
    example=Example(
        {"text": {"model": MODEL, "prompt": "senile cataract", "max_tokens": 64}},
        {
            "id": f"cmpl-{SUFFIX}",
            "object": "text_completion",
            "created": 1_772_366_400,
            "model": MODEL,
            "system_fingerprint": None,
            "choices": [
                {
                    "index": 0,
                    "text": "Diseases of the eye",
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 21, "completion_tokens": 6, "total_tokens": 27},
        },
    ),
)
def openai_create_completion(request: TextCompletionCreate) -> TextCompletion:
    """Continue texts or token ids as they are; `messages` of a chat are rendered with the model's template.

    A model that no deployment serves gets one, for a key with `deployments:write`.
    """
    raise NotImplementedError
