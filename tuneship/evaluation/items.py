"""A line of a dataset as a question to ask and the answer to compare with."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuneship.contract.lines.dataset_lines import (
    Message,
    decode_line,
    parse_example,
)
from tuneship.contract.lines.line_fields import DatasetFormat
from tuneship.contract.lines.row_values import structured
from tuneship.contract.lines.tool_lines import tools_of


@dataclass(eq=False)
class MetadataRefused(Exception):
    """The metadata of an example do not fit: a code, the field's place in the request, a message without content."""

    code: str
    field: str
    message: str
    # The position in the list of examples.
    example: int | None = None


@dataclass(frozen=True)
class EvaluationItem:
    """An example: the turns before the last answer, and that answer."""

    # The turns as a dataset has them: the arguments of calls are objects.
    prompt: tuple[Message, ...]
    reference: str
    # The calls of the reference, and the functions that a model may call.
    calls: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as a request has it: arguments as text, and an id for each call."""
        made: list[dict[str, Any]] = []
        waiting: list[str] = []
        for number, turn in enumerate(self.prompt):
            one: dict[str, Any] = {"role": turn["role"], "content": turn["content"]}
            if "tool_calls" in turn:
                one["tool_calls"] = _requested(turn["tool_calls"], number)
                waiting = [call["id"] for call in one["tool_calls"]]
            if turn["role"] == "tool":
                # A result without an id belongs to the first call that waits for one.
                known = turn.get("tool_call_id", waiting[0] if waiting else f"call_{number}")
                one["tool_call_id"] = known
                waiting = [name for name in waiting if name != known]
            made.append(one)
        return made


def _requested(calls: Sequence[Mapping[str, Any]], turn: int) -> list[dict[str, Any]]:
    return [
        {
            "id": call.get("id", f"call_{turn}_{number}"),
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for number, call in enumerate(calls)
    ]


def read_item(line: bytes | Mapping[str, Any], dataset_format: DatasetFormat) -> EvaluationItem:
    """Read one line. Raises `ExampleProblem`."""
    fields = decode_line(line) if isinstance(line, bytes) else line
    *prompt, answer = parse_example(fields, dataset_format)
    return EvaluationItem(
        tuple(prompt),
        answer["content"],
        tuple(answer.get("tool_calls", ())),
        tuple(tools_of(fields)) if dataset_format == "conversation" else (),
        structured(fields.get("metadata"), "metadata", dict) or {},
    )
