"""The events of a streamed response, in their order; each has its kind as `type` and a number of its own."""

from typing import Any, Literal

from pydantic import Field

from tuneship.contract.common import Reply
from tuneship.contract.openai.responses import (
    Nothing,
    OutputCall,
    OutputMessage,
    OutputText,
    ResponseObject,
)


class NumberedEvent(Reply):
    """The place of an event in its stream."""

    sequence_number: int


class ResponseStateEvent(NumberedEvent):
    """The response as it began, or as it ended."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class OutputItemEvent(NumberedEvent):
    """The answer's message or a call began, or ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputMessage | OutputCall


class TextPlace(NumberedEvent):
    """The place of a text in its response, where it is the first item."""

    item_id: str
    output_index: Literal[0] = 0
    content_index: Literal[0] = 0


class ContentPartEvent(TextPlace):
    """The message's text began, or ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText


class TextDeltaEvent(TextPlace):
    """A piece of the text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    delta: str
    logprobs: Nothing = Field(default_factory=list[Any])


class TextDoneEvent(TextPlace):
    """The whole text."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str
    logprobs: Nothing = Field(default_factory=list[Any])


class ArgumentsPlace(NumberedEvent):
    """The place of a call in its response."""

    item_id: str
    output_index: int


class ArgumentsDeltaEvent(ArgumentsPlace):
    """A piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"] = (
        "response.function_call_arguments.delta"
    )
    delta: str


class ArgumentsDoneEvent(ArgumentsPlace):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    arguments: str


ResponseEvent = (
    ResponseStateEvent
    | OutputItemEvent
    | ContentPartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)
