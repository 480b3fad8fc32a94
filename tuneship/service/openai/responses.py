"""Responses: what answers them, their runs of the main API's generation, with OpenAI's events, and their handler."""

import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from tuneship.contract.errors import error_from_answer
from tuneship.contract.generation import BrokenOff, Generate, GeneratedText, Generation
from tuneship.contract.openai import responses as contract
from tuneship.contract.openai.ids import new_form_id
from tuneship.contract.openai.response_events import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
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
    AnswerTool,
    IncompleteDetails,
    InputCall,
    InputReasoning,
    OutputCall,
    OutputMessage,
    OutputText,
    ResponseCreate,
    ResponseFailure,
    ResponseObject,
    ResponseStatus,
    ResponseToolChoice,
    ResponseUsage,
)
from tuneship.contract.schemas.tools import WrittenCall, fault_of_calls
from tuneship.service.answers.field_errors import field_error, with_names
from tuneship.service.answers.streaming import Frame, Stream, reframed
from tuneship.service.context.context import Context
from tuneship.service.generation.drills import generation_run
from tuneship.service.openai.answers import choice_fields, generate_of, joined_turns
from tuneship.service.openai.bindings import serves_openai
from tuneship.service.openai.errors import openai_error
from tuneship.service.openai.model_lookup import answerer_of
from tuneship.service.openai.openai_run import OpenAIRun
from tuneship.store.database.identifiers import new_id

NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}


@serves_openai(contract.openai_create_response)
async def openai_create_response(
    context: Context, request: ResponseCreate
) -> ResponseObject | Stream:
    """Answer the conversation."""
    return await (await response_run(context, request)).answer()


async def response_run(context: Context, request: ResponseCreate) -> OpenAIRun[ResponseObject]:
    """The run that answers a conversation; without a limit, up to what the deployment allows."""
    started = time.perf_counter()
    answerer = await answerer_of(context, request.model, request.person)
    tools = range(len(request.tools or ()))
    names = NAMES | {f"tools[{place}].function": f"tools[{place}]" for place in tools}
    with with_names(names):
        wanted = _generate_of(request, answerer.settings)
    run = generation_run(context, answerer.target, wanted, started)
    run.names = names
    begun = _begun(
        request,
        answerer.settings,
        new_id("gen"),
        created_at=int(context.now.timestamp()),
        model=answerer.model,
    )

    async def stream() -> Stream:
        events = _Events(begun, context)
        return await reframed(await run.stream(), events.first(), events.of)

    return OpenAIRun(
        run,
        lambda: _ended(begun, run.generation, int(context.now.timestamp())),
        stream if request.stream else None,
    )


def _generate_of(request: ResponseCreate, settings: Mapping[str, Any]) -> Generate:
    """The request as the main API takes it.

    Raises `ValidationFailed` for a conversation that no model can continue.
    """
    said: list[dict[str, Any]] = []
    if request.instructions:
        said.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        said.append({"role": "user", "content": request.input})
    else:
        for item in request.input:
            if isinstance(item, InputReasoning):
                continue
            if not isinstance(item, InputCall):
                said.append(item.turn)
                continue
            # Calls belong to the assistant's turn before them.
            if not said or said[-1]["role"] != "assistant":
                said.append({"role": "assistant", "content": ""})
            said[-1].setdefault("tool_calls", []).append(item.call)
    turns = joined_turns(said)
    fault = fault_of_calls(turns)
    if fault is not None:
        raise field_error("input", f"holds a turn whose calls do not fit: {fault.message}")
    form = None if request.text is None else request.text.format
    return generate_of(
        {
            "messages": turns,
            "max_tokens": request.max_output_tokens or settings.get("max_output_tokens"),
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stream": request.stream,
            "response_format": None if form is None else form.for_the_main_api,
            "tools": [tool.for_the_main_api for tool in request.tools or ()],
            **choice_fields(request),
        }
    )


def _begun(
    request: ResponseCreate, settings: Mapping[str, Any], generation_id: str, **head: Any
) -> ResponseObject:
    temperature, top_p = request.temperature, request.top_p
    form = None if request.text is None else request.text.format
    choice: Any = request.tool_choice or "auto"
    if isinstance(choice, ResponseToolChoice) and choice.name is not None:
        choice = {"type": choice.type, "name": choice.name}
    elif isinstance(choice, ResponseToolChoice):
        tools = [{"type": "function", "name": tool.name} for tool in choice.tools or ()]
        choice = {"type": choice.type, "mode": choice.mode, "tools": tools}
    shown = None if form is None else AnswerFormat(**form.model_dump(by_alias=True))
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
        text=AnswerText() if shown is None else AnswerText(format=shown),
        tools=[AnswerTool(**tool.model_dump()) for tool in request.tools or ()],
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        user=request.user,
        **head,
    )


def _message(begun: ResponseObject, status: ResponseStatus, *texts: str) -> OutputMessage:
    return OutputMessage(
        id=new_form_id(begun.id, "msg"),
        status=status,
        content=[OutputText(text=text) for text in texts],
    )


def _call_item(call: WrittenCall, status: ResponseStatus) -> OutputCall:
    call_id = call.id or ""
    return OutputCall(
        id=new_form_id(call_id, "fc"),
        call_id=call_id,
        name=call.function.name or "",
        arguments=call.function.arguments,
        status=status,
    )


def _ended(begun: ResponseObject, generation: Generation, completed_at: int) -> ResponseObject:
    """The response with its answer, which is incomplete where it reached its limit."""
    is_cut = generation.finish_reason == "length"
    status: ResponseStatus = "incomplete" if is_cut else "completed"
    # The text, then the calls: only the last item may be incomplete.
    calls = generation.tool_calls or []
    items: list[OutputMessage | OutputCall] = []
    if generation.completion or not calls:
        items.append(_message(begun, "completed" if calls else status, generation.completion))
    for number, call in enumerate(calls):
        is_last = number == len(calls) - 1
        items.append(_call_item(call, status if is_last else "completed"))

    usage = generation.usage
    changed: dict[str, Any] = {
        "status": status,
        "completed_at": None if is_cut else completed_at,
        "incomplete_details": IncompleteDetails() if is_cut else None,
        "output": items,
        "usage": ResponseUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        ),
    }
    return begun.model_copy(update=changed)


class _Events:
    """Turns one streamed generation into OpenAI's events, each with its number."""

    def __init__(self, begun: ResponseObject, context: Context) -> None:
        self._begun = begun
        self._context = context
        self._numbers: Iterator[int] = count()
        self._item_id = new_form_id(begun.id, "msg")
        # The place of the item that was sent last; those before it have ended.
        self._index = -1
        self._has_message = False
        # The call that was sent last.
        self._call: OutputCall | None = None
        self._text = ""

    def first(self) -> list[Frame]:
        """The events before the answer."""
        begun = self._begun
        events: list[ResponseEvent] = [
            ResponseStateEvent(type=kind, sequence_number=next(self._numbers), response=begun)
            for kind in ("response.created", "response.in_progress")
        ]
        # With functions, only the answer shows whether there is any text.
        if not begun.tools:
            events += self._open_message()
        return _frames(events)

    def of(self, frame: Frame) -> list[Frame]:
        """The events of a piece of the generation, or of its end."""
        if isinstance(frame.data, GeneratedText):
            return _frames(self._piece(frame.data))
        if isinstance(frame.data, Generation):
            ended = _ended(self._begun, frame.data, int(self._context.now.timestamp()))
            opened = [] if self._has_message or self._call is not None else self._open_message()
            events = [*opened, *self._close(ended.status)]
            is_incomplete = ended.status == "incomplete"
            end = ResponseStateEvent(
                type="response.incomplete" if is_incomplete else "response.completed",
                sequence_number=next(self._numbers),
                response=ended,
            )
            return _frames([*events, end])
        if isinstance(frame.data, BrokenOff):
            error = openai_error(error_from_answer(None, frame.data.model_dump()))
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

    def _piece(self, piece: GeneratedText) -> list[ResponseEvent]:
        """The events of a text and of pieces of calls; the first piece of a call ends the item before it."""
        events: list[ResponseEvent] = []
        if piece.text or not self._begun.tools:
            self._text += piece.text
            events += [] if self._has_message else self._open_message()
            events.append(TextDeltaEvent(delta=piece.text, **self._place()))
        for call in piece.tool_calls or ():
            if call.id is not None:
                events += self._close("completed")
                self._index += 1
                self._call = _call_item(call, "in_progress")
                events.append(self._item_event("response.output_item.added", self._call))
            last, delta = self._call, call.function.arguments
            if last is not None and delta:
                self._call = last.model_copy(update={"arguments": last.arguments + delta})
                events.append(ArgumentsDeltaEvent(delta=delta, **self._call_place(last)))
        return events

    def _open_message(self) -> list[ResponseEvent]:
        self._has_message = True
        self._index += 1
        added = self._item_event("response.output_item.added", _message(self._begun, "in_progress"))
        part = OutputText(text="")
        return [
            added,
            ContentPartEvent(type="response.content_part.added", part=part, **self._place()),
        ]

    def _close(self, status: ResponseStatus) -> list[ResponseEvent]:
        """The events at the end of the item that was sent last."""
        if self._call is not None:
            ended = self._call.model_copy(update={"status": status})
            return [
                ArgumentsDoneEvent(
                    name=ended.name, arguments=ended.arguments, **self._call_place(ended)
                ),
                self._item_event("response.output_item.done", ended),
            ]
        if not self._has_message:
            return []
        part, message = OutputText(text=self._text), _message(self._begun, status, self._text)
        return [
            TextDoneEvent(text=self._text, **self._place()),
            ContentPartEvent(type="response.content_part.done", part=part, **self._place()),
            self._item_event("response.output_item.done", message),
        ]

    def _item_event(self, kind: Any, item: OutputMessage | OutputCall) -> OutputItemEvent:
        return OutputItemEvent(
            type=kind,
            sequence_number=next(self._numbers),
            output_index=self._index,
            item=item,
        )

    def _call_place(self, call: OutputCall) -> dict[str, Any]:
        return {
            "sequence_number": next(self._numbers),
            "item_id": call.id,
            "output_index": self._index,
        }

    def _place(self) -> dict[str, Any]:
        return {"sequence_number": next(self._numbers), "item_id": self._item_id}


def _frames(events: list[ResponseEvent]) -> list[Frame]:
    return [Frame(event.type, event) for event in events]
