"""Turns requests of OpenAI's clients into generations, and generations into OpenAI's answers. Pure."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from tuneship.contract.errors import error_from_answer
from tuneship.contract.generation import (
    BrokenOff,
    Generate,
    GeneratedChoice,
    GeneratedText,
    Generation,
    TokenLogprob,
)
from tuneship.contract.openai.answer_parts import CompletionUsage, FinishReason, SampledRequest
from tuneship.contract.openai.chat import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionCreate,
    ChatDelta,
    CountedChatChunk,
)
from tuneship.contract.openai.completions import (
    CountedTextPiece,
    TextChoice,
    TextCompletion,
    TextCompletionCreate,
)
from tuneship.contract.openai.responses import ResponseCreate
from tuneship.service.answers.field_errors import error_from_pydantic
from tuneship.service.answers.streaming import Frame, Stream, reframed
from tuneship.service.generation.accounting import WrittenAnswers
from tuneship.service.openai.errors import openai_error
from tuneship.service.openai.logprobs import (
    chat_logprobs,
    offsets_of,
    prompt_offsets,
    text_logprobs,
)

SYSTEM = ("system", "developer")
# Any other reason becomes "stop".
REASONS: Mapping[str, FinishReason] = {"length": "length", "tool_calls": "tool_calls"}


def generation_of(request: SampledRequest, **prompt: Any) -> Generate:
    """The request as the main API takes it; `prompt` holds the text or the turns, and `max_tokens`.

    Raises `ValidationFailed` for a conversation that no model can continue.
    """
    fields = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "stop": request.stops,
        "stream": request.stream,
        "n": request.n,
        **prompt,
    }
    return generate_of(fields)


def generate_of(fields: Mapping[str, Any]) -> Generate:
    """A request of the main API; a field that is None is not sent. Raises `ValidationFailed`."""
    sent = {name: value for name, value in fields.items() if value is not None}
    try:
        return Generate.model_validate(sent)
    except ValidationError as error:
        raise error_from_pydantic(error) from None


def choice_fields(request: ChatCompletionCreate | ResponseCreate) -> dict[str, Any]:
    """The functions that may or must be called, as the main API takes them."""
    chosen = request.chosen
    return {
        "tool_choice": chosen.mode,
        "allowed_tools": chosen.names,
        "parallel_tool_calls": request.parallel_tool_calls and not chosen.is_named,
    }


def joined_turns(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns of a conversation; the system and developer turns at its beginning are one."""
    first = next(
        (number for number, turn in enumerate(turns) if turn["role"] not in SYSTEM), len(turns)
    )
    for turn in turns:
        turn["role"] = "system" if turn["role"] in SYSTEM else turn["role"]
    if first < 2:
        return turns
    joined = "\n\n".join(turn["content"] for turn in turns[:first])
    return [{"role": "system", "content": joined}, *turns[first:]]


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
    """All answers to a conversation."""
    choices = [
        ChatChoice(
            index=index,
            message=ChatAnswer(
                content=None if one.tool_calls and not one.completion else one.completion,
                tool_calls=one.tool_calls,
            ),
            logprobs=chat_logprobs(one.logprobs),
            finish_reason=_reason(one.finish_reason),
        )
        for index, one in enumerate(_choices(generation))
    ]
    return ChatCompletion(**head.fields, choices=choices, usage=usage_of(generation))


def text_completion(
    head: AnswerHead,
    request: TextCompletionCreate,
    written: WrittenAnswers,
    prompts: Sequence[str],
    generation: Generation,
) -> TextCompletion:
    """All answers to the prompts, whose texts are `prompts`; with `echo`, each begins with its prompt."""
    choices: list[TextChoice] = []
    for index, answer in enumerate(written.answers):
        number = index // request.n
        prompt = prompts[number] if request.echo else ""
        text = prompt + answer.completion
        logprobs = None
        if request.logprobs is not None:
            echoed = written.answers[number * request.n].prompt_logprobs or []
            own = [*(answer.logprobs or ()), *([answer.end] if answer.end else ())]
            offsets = [
                *prompt_offsets(echoed, prompt),
                *offsets_of(own, len(prompt), len(text)),
            ]
            logprobs = text_logprobs([*echoed, *own], offsets)
        reason = _reason(answer.finish_reason)
        choices.append(TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason))
    return TextCompletion(**head.fields, choices=choices, usage=usage_of(generation))


def _choices(generation: Generation) -> list[GeneratedChoice]:
    first = GeneratedChoice(
        completion=generation.completion,
        tool_calls=generation.tool_calls,
        finish_reason=generation.finish_reason,
        logprobs=generation.logprobs,
    )
    return generation.choices or [first]


def _reason(finish_reason: str) -> FinishReason:
    return REASONS.get(finish_reason, "stop")


@dataclass(frozen=True)
class Pieces:
    """How one kind of answer is streamed: its first pieces, a piece of text, its ends, and its usage."""

    first: Sequence[BaseModel]
    text: Callable[[GeneratedText], BaseModel]
    ends: Callable[[Generation], Sequence[BaseModel]]
    # None where nobody has asked for it.
    usage: Callable[[CompletionUsage], BaseModel] | None


def chat_pieces(head: AnswerHead, request: ChatCompletionCreate) -> Pieces:
    """The pieces of the answers to a conversation."""
    kind = CountedChatChunk if request.wants_usage else ChatChunk

    def chunk(index: int, delta: ChatDelta, **more: Any) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, **more)
        return kind(**head.fields, choices=[choice])

    return Pieces(
        [chunk(index, ChatDelta(role="assistant", content="")) for index in range(request.n)],
        lambda piece: chunk(
            piece.index or 0,
            ChatDelta(
                content=None if piece.tool_calls and not piece.text else piece.text,
                tool_calls=piece.tool_calls,
            ),
            logprobs=chat_logprobs(piece.logprobs),
        ),
        lambda generation: [
            chunk(index, ChatDelta(), finish_reason=_reason(one.finish_reason))
            for index, one in enumerate(_choices(generation))
        ],
        None
        if not request.wants_usage
        else lambda usage: CountedChatChunk(**head.fields, choices=[], usage=usage),
    )


def text_pieces(
    head: AnswerHead, request: TextCompletionCreate, written: Callable[[], WrittenAnswers]
) -> Pieces:
    """The pieces of the answers to texts; `written` is asked at the end."""
    lengths: dict[int, int] = {}
    kind = CountedTextPiece if request.wants_usage else TextCompletion

    def piece(index: int, text: str, tokens: list[TokenLogprob] | None, **more: Any) -> BaseModel:
        start = lengths.get(index, 0)
        lengths[index] = end = start + len(text)
        logprobs = None if tokens is None else text_logprobs(tokens, offsets_of(tokens, start, end))
        choice = TextChoice(index=index, text=text, logprobs=logprobs, **more)
        return kind(**head.fields, choices=[choice])

    return Pieces(
        [],
        lambda part: piece(part.index or 0, part.text, part.logprobs),
        lambda _: [
            piece(
                index,
                "",
                None if answer.end is None else [answer.end],
                finish_reason=_reason(answer.finish_reason),
            )
            for index, answer in enumerate(written().answers)
        ],
        None
        if not request.wants_usage
        else lambda usage: CountedTextPiece(**head.fields, choices=[], usage=usage),
    )


async def openai_stream(stream: Awaitable[Stream], pieces: Pieces) -> Stream:
    """The stream of a generation as OpenAI's clients read it: data without names of events, `[DONE]` at the end."""

    def reframe(frame: Frame) -> list[Frame]:
        if isinstance(frame.data, GeneratedText):
            return [Frame("", pieces.text(frame.data))]
        if isinstance(frame.data, BrokenOff):
            error = openai_error(error_from_answer(None, cast("object", frame.data.model_dump())))
            return [Frame("", BrokenOff.model_validate(error.as_json(None)))]
        if isinstance(frame.data, Generation):
            usage = [] if pieces.usage is None else [pieces.usage(usage_of(frame.data))]
            last = [*pieces.ends(frame.data), *usage]
            return [*(Frame("", piece) for piece in last), Frame("", "[DONE]")]
        return []

    return await reframed(await stream, [Frame("", piece) for piece in pieces.first], reframe)
