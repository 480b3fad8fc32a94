"""The handler of responses: it runs the generation of the main API, and tells it as OpenAI's response or its events."""

import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from pydantic import ValidationError

from tuneship.contract.errors import error_from_answer
from tuneship.contract.generation import BrokenOff, Generate, GeneratedText, Generation
from tuneship.contract.openai import responses as contract
from tuneship.contract.openai.ids import new_form_id
from tuneship.contract.openai.response_events import (
    ContentPartEvent,
    OutputItemEvent,
    ResponseEvent,
    ResponseStateEvent,
    TextDeltaEvent,
    TextDoneEvent,
)
from tuneship.contract.openai.responses import (
    AnswerFormat,
    AnswerText,
    IncompleteDetails,
    InputMessage,
    OutputMessage,
    OutputText,
    ResponseCreate,
    ResponseFailure,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from tuneship.service.common.refusals import refusal
from tuneship.service.common.streaming import Frame, Stream, reframed
from tuneship.service.context.context import Context
from tuneship.service.generation.generation_run import GenerationRun
from tuneship.service.openai.answers import routing_key_of, turns_of
from tuneship.service.openai.bindings import serves_openai
from tuneship.service.openai.refusals import openai_refusal, with_names
from tuneship.service.openai.targets import deployment_of, target_of
from tuneship.store.identifiers import new_id

NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}


@serves_openai(contract.openai_create_response)
async def openai_create_response(
    context: Context, request: ResponseCreate
) -> ResponseObject | Stream:
    """Answer the conversation; without a limit, up to what the deployment allows."""
    started = time.perf_counter()
    if context.routing_key is None:
        context.routing_key = routing_key_of(request.person)
    target = await target_of(context, request.model)
    deployment = await deployment_of(context, target)
    # Without a row the run below refuses the request.
    settings: Mapping[str, Any] = {} if deployment is None else deployment["generation"]
    with with_names(NAMES):
        run = GenerationRun(context, target, _generate_of(request, settings), started)
        begun = _begun(
            request,
            settings,
            new_id("gen"),
            created_at=int(context.now.timestamp()),
            model="" if deployment is None else deployment["model_name"],
        )
        if not request.stream:
            ended, _ = _ended(begun, await run.answer(), int(context.now.timestamp()))
            return ended
        events = _Events(begun, context)
        return await reframed(await run.stream(), events.first(), events.of)


def _generate_of(request: ResponseCreate, settings: Mapping[str, Any]) -> Generate:
    """The request as the main API takes it.

    Raises `ValidationRefused` for a conversation that no model can continue.
    """
    messages = request.input
    if isinstance(messages, str):
        messages = [InputMessage(role="user", content=messages)]
    if request.instructions is not None:
        messages = [InputMessage(role="system", content=request.instructions), *messages]
    form = None if request.text is None else request.text.format
    try:
        return Generate(
            messages=turns_of(messages),  # pyright: ignore[reportArgumentType]
            max_tokens=request.max_output_tokens or settings.get("max_output_tokens"),
            temperature=request.temperature,
            top_p=request.top_p,
            stream=request.stream,
            response_format=None if form is None else form.for_the_main_api,  # pyright: ignore[reportArgumentType]
        )
    except ValidationError as error:
        raise refusal(error) from None


def _begun(
    request: ResponseCreate, settings: Mapping[str, Any], generation_id: str, **head: Any
) -> ResponseObject:
    temperature, top_p = request.temperature, request.top_p
    return ResponseObject(
        id=new_form_id(generation_id, "resp"),
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        prompt_cache_key=request.prompt_cache_key,
        safety_identifier=request.safety_identifier,
        temperature=settings.get("default_temperature", 1) if temperature is None else temperature,
        top_p=settings.get("default_top_p", 1) if top_p is None else top_p,
        text=_text_of(request),
        user=request.user,
        **head,
    )


def _text_of(request: ResponseCreate) -> AnswerText:
    form = None if request.text is None else request.text.format
    if form is None:
        return AnswerText()
    return AnswerText(format=AnswerFormat(**form.model_dump(by_alias=True)))


def _message(begun: ResponseObject, status: ResponseStatus, *texts: str) -> OutputMessage:
    return OutputMessage(
        id=new_form_id(begun.id, "msg"),
        status=status,
        content=[OutputText(text=text) for text in texts],
    )


def _ended(
    begun: ResponseObject, generation: Generation, completed_at: int
) -> tuple[ResponseObject, OutputMessage]:
    """The response with its answer, which is incomplete where it reached its limit."""
    is_cut = generation.finish_reason == "length"
    status: ResponseStatus = "incomplete" if is_cut else "completed"
    message = _message(begun, status, generation.completion)
    usage = generation.usage
    changed: dict[str, Any] = {
        "status": status,
        "completed_at": None if is_cut else completed_at,
        "incomplete_details": IncompleteDetails() if is_cut else None,
        "output": [message],
        "usage": ResponseUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        ),
    }
    return begun.model_copy(update=changed), message


class _Events:
    """Tells one streamed generation as OpenAI's events, each with its number."""

    def __init__(self, begun: ResponseObject, context: Context) -> None:
        self._begun = begun
        self._context = context
        self._numbers: Iterator[int] = count()
        self._item_id = new_form_id(begun.id, "msg")

    def first(self) -> list[Frame]:
        """The events before the text."""
        begun = self._begun
        events: list[ResponseEvent] = [
            *(
                ResponseStateEvent(type=kind, sequence_number=next(self._numbers), response=begun)
                for kind in ("response.created", "response.in_progress")
            ),
            OutputItemEvent(
                type="response.output_item.added",
                sequence_number=next(self._numbers),
                item=_message(begun, "in_progress"),
            ),
            ContentPartEvent(
                type="response.content_part.added", part=OutputText(text=""), **self._place()
            ),
        ]
        return _frames(events)

    def of(self, frame: Frame) -> list[Frame]:
        """The events of a piece of the generation, or of its end."""
        if isinstance(frame.data, GeneratedText):
            return _frames([TextDeltaEvent(delta=frame.data.text, **self._place())])
        if isinstance(frame.data, Generation):
            return _frames(self._end(frame.data))
        if isinstance(frame.data, BrokenOff):
            error = openai_refusal(error_from_answer(500, frame.data.model_dump()))
            failed: dict[str, Any] = {
                "status": "failed",
                "error": ResponseFailure(message=error.message),
            }
            event = ResponseStateEvent(
                type="response.failed",
                sequence_number=next(self._numbers),
                response=self._begun.model_copy(update=failed),
            )
            return _frames([event])
        return []

    def _end(self, generation: Generation) -> list[ResponseEvent]:
        now = int(self._context.now.timestamp())
        ended, message = _ended(self._begun, generation, now)
        text = generation.completion
        is_cut = ended.incomplete_details is not None
        return [
            TextDoneEvent(text=text, **self._place()),
            ContentPartEvent(
                type="response.content_part.done", part=OutputText(text=text), **self._place()
            ),
            OutputItemEvent(
                type="response.output_item.done",
                sequence_number=next(self._numbers),
                item=message,
            ),
            ResponseStateEvent(
                type="response.incomplete" if is_cut else "response.completed",
                sequence_number=next(self._numbers),
                response=ended,
            ),
        ]

    def _place(self) -> dict[str, Any]:
        return {"sequence_number": next(self._numbers), "item_id": self._item_id}


def _frames(events: list[ResponseEvent]) -> list[Frame]:
    return [Frame(event.type, event) for event in events]
