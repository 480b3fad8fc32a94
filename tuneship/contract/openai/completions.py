"""Completions of OpenAI's API: one text in, one text out. The text is the user's turn of the model's chat template."""

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from tuneship.contract.common import Reply, absent
from tuneship.contract.examples import MODEL, SUFFIX
from tuneship.contract.openai.answering import (
    PENALTIES,
    WITHOUT_ALTERNATIVES,
    Answered,
    CompletionUsage,
    FinishReason,
    SampledRequest,
    Text,
)
from tuneship.contract.openai.declaring import openai_operation
from tuneship.contract.openai.fields import NeutralFields
from tuneship.contract.operation import Example


def _one_text(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    texts = cast("list[Any]", value)
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    text = "must be one text: several prompts and token ids are not supported"
    raise PydanticCustomError("unsupported_value", text, {"param": "prompt"})


class TextCompletionCreate(SampledRequest):
    """A text that a model shall answer."""

    neutral: ClassVar[NeutralFields] = {
        **WITHOUT_ALTERNATIVES,
        **PENALTIES,
        "best_of": (1,),
        "echo": (False,),
    }
    unsupported = frozenset({"logprobs", "suffix"})

    prompt: Annotated[Text, BeforeValidator(_one_text)]
    max_tokens: Annotated[int, Field(ge=1)] = 16


class TextChoice(Reply):
    """One answer, or a piece of it."""

    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None


class TextCompletion(Answered):
    """An answer to a text, or one piece of a streamed answer."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Annotated[CompletionUsage | None, Field(exclude_if=absent)] = None


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
    """Answer one text."""
    raise NotImplementedError
