"""Turns requests of OpenAI's clients into generations, and generations into OpenAI's answers. Pure."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from tuneship.contract.errors import error_from_answer
from tuneship.contract.generation import BrokenOff, Generate, GeneratedText, Generation
from tuneship.contract.openai.answering import CompletionUsage, FinishReason, SampledRequest
from tuneship.contract.openai.chat import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
)
from tuneship.contract.openai.completions import TextChoice, TextCompletion
from tuneship.contract.openai.responses import InputMessage
from tuneship.service.common.refusals import refusal
from tuneship.service.common.streaming import Frame, Stream, reframed
from tuneship.service.openai.refusals import openai_refusal

SYSTEM = ("system", "developer")


def generation_of(request: SampledRequest, **prompt: Any) -> Generate:
    """The request as the main API takes it; `prompt` holds the text or the turns, and `max_tokens`.

    Raises `ValidationRefused` for a conversation that no model can continue.
    """
    fields = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "stop": request.stops,
        "stream": request.stream,
        **prompt,
    }
    try:
        return Generate.model_validate(fields)
    except ValidationError as error:
        raise refusal(error) from None


def turns_of(messages: Sequence[ChatMessage | InputMessage]) -> list[dict[str, str]]:
    """The turns of a conversation; the system and developer turns at its beginning are one."""
    turns = [{"role": message.role, "content": message.text} for message in messages]
    first = next(
        (number for number, turn in enumerate(turns) if turn["role"] not in SYSTEM), len(turns)
    )
    for turn in turns:
        turn["role"] = "system" if turn["role"] in SYSTEM else turn["role"]
    if first < 2:
        return turns
    joined = "\n\n".join(turn["content"] for turn in turns[:first])
    return [{"role": "system", "content": joined}, *turns[first:]]


def routing_key_of(person: str | None) -> str | None:
    """The routing key of a person, by which a canary sends all requests of one person to one deployment."""
    return None if person is None else hashlib.sha256(person.encode()).hexdigest()


@dataclass(frozen=True)
class AnswerHead:
    """The fields that all pieces of one answer share."""

    id: str
    created: int
    model: str

    @property
    def fields(self) -> dict[str, Any]:
        """The fields by name."""
        return {"id": self.id, "created": self.created, "model": self.model}


def usage_of(generation: Generation) -> CompletionUsage:
    """The tokens of an answer."""
    return CompletionUsage(**generation.usage.model_dump())


def chat_completion(head: AnswerHead, generation: Generation) -> ChatCompletion:
    """A whole answer to a conversation."""
    choice = ChatChoice(
        message=ChatAnswer(content=generation.completion), finish_reason=_reason(generation)
    )
    return ChatCompletion(**head.fields, choices=[choice], usage=usage_of(generation))


def text_completion(head: AnswerHead, generation: Generation) -> TextCompletion:
    """A whole answer to a text."""
    choice = TextChoice(text=generation.completion, finish_reason=_reason(generation))
    return TextCompletion(**head.fields, choices=[choice], usage=usage_of(generation))


def _reason(generation: Generation) -> FinishReason:
    return "length" if generation.finish_reason == "length" else "stop"


@dataclass(frozen=True)
class Pieces:
    """How one kind of answer is streamed: its first piece, a piece of text, its end, and its usage."""

    first: Sequence[BaseModel]
    text: Callable[[str], BaseModel]
    end: Callable[[FinishReason], BaseModel]
    usage: Callable[[CompletionUsage], BaseModel]


def chat_pieces(head: AnswerHead) -> Pieces:
    """The pieces of an answer to a conversation."""

    def chunk(delta: ChatDelta, reason: FinishReason | None = None) -> ChatChunk:
        choice = ChatChunkChoice(delta=delta, finish_reason=reason)
        return ChatChunk(**head.fields, choices=[choice])

    return Pieces(
        [chunk(ChatDelta(role="assistant", content=""))],
        lambda text: chunk(ChatDelta(content=text)),
        lambda reason: chunk(ChatDelta(), reason),
        lambda usage: ChatChunk(**head.fields, choices=[], usage=usage),
    )


def text_pieces(head: AnswerHead) -> Pieces:
    """The pieces of an answer to a text."""

    def piece(text: str, reason: FinishReason | None = None) -> TextCompletion:
        choice = TextChoice(text=text, finish_reason=reason)
        return TextCompletion(**head.fields, choices=[choice])

    return Pieces(
        [],
        piece,
        lambda reason: piece("", reason),
        lambda usage: TextCompletion(**head.fields, choices=[], usage=usage),
    )


async def openai_stream(stream: Stream, pieces: Pieces, *, wants_usage: bool) -> Stream:
    """The stream of a generation as OpenAI's clients read it: data without names of events, `[DONE]` at the end."""
    first = [Frame("", piece) for piece in pieces.first]
    return await reframed(stream, first, lambda frame: _frames(frame, pieces, wants_usage))


def _frames(frame: Frame, pieces: Pieces, wants_usage: bool) -> list[Frame]:
    if isinstance(frame.data, GeneratedText):
        return [Frame("", pieces.text(frame.data.text))]
    if isinstance(frame.data, BrokenOff):
        error = openai_refusal(error_from_answer(500, cast("object", frame.data.model_dump())))
        return [Frame("", BrokenOff.model_validate(error.as_json(None)))]
    if isinstance(frame.data, Generation):
        usage = [pieces.usage(usage_of(frame.data))] if wants_usage else []
        last = [pieces.end(_reason(frame.data)), *usage]
        return [*(Frame("", piece) for piece in last), Frame("", "[DONE]")]
    return []
