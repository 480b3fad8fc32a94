"""How a chat template writes function calls, derived from its rendering of two invented calls.

For a template that does not know functions, a text before it turns functions, calls and results into ordinary turns.
Next: `template.py` (renders), `service/generation/tool_grammar.py` (an answer that is a call).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# Stands before the template, so that an exported model renders the same.
PRELUDE = (Path(__file__).parent / "tool_prelude.jinja").read_text(encoding="utf-8")
ARGUMENTS = {"zqkey": "zqvalue", "zqmore": "zqlast"}
# These arguments as a template writes them, with what stands between their parts.
SPELLED = re.compile(r'\{(\s*)"zqkey"(\s*:\s*)"zqvalue"(\s*,\s*)"zqmore"(\s*:\s*)"zqlast"(\s*)\}')
NAME_CHARACTER = re.compile(r"[A-Za-z0-9_-]")
# What a text must begin with to differ from other text: up to the first space or brace.
MARKER = re.compile(r"[^\s{]{3,}")


class Renders(Protocol):
    """Renders messages, as a chat template does."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str | None:
        """The text; None where the template refuses the messages."""
        ...


@dataclass(frozen=True)
class CallSyntax:
    """The text around the names and the arguments of the calls in an answer."""

    # Before the name in the first call.
    begin: str
    # Between a call's name and its arguments, which are a JSON object.
    middle: str
    # From the arguments of one call to the name in the next; None where a turn has one call only.
    between: str | None
    # After the last call's arguments.
    end: str
    # Between two arguments, and between a name and its value; None where the template indents arguments.
    separators: tuple[str, str] | None = (", ", ": ")

    @property
    def marker(self) -> str:
        """The text that marks a call within other text; empty if calls can only begin an answer."""
        found = MARKER.match(self.begin)
        return found[0] if found else ""


def shows_tools(render: Renders) -> bool:
    """Whether a template writes the functions of a request, calls of them and their results."""
    asked = [{"role": "user", "content": "zqask"}]
    listed = render(asked, add_generation_prompt=True, tools=[_tool("zqfunction")]) or ""
    # Some templates render no conversation with calls without functions; these are of another one.
    others = [_tool("zqother")]
    called = render([*asked, _called(1)], add_generation_prompt=False, tools=others) or ""
    result = {
        "role": "tool",
        "tool_call_id": "zqcall001",
        "name": "zqfunction",
        "content": "zqresult",
    }
    turns = [*asked, _called(1), result]
    answered = render(turns, add_generation_prompt=True, tools=others) or ""
    return (
        "zqfunction" in listed
        and "zqpurpose" in listed
        and "zqfunction" in called
        and "zqvalue" in called
        and "zqresult" in answered
    )


def shows_system_turns(render: Renders) -> bool:
    """Whether a template writes a system turn."""
    turns = [{"role": "system", "content": "zqsystem"}, {"role": "user", "content": "zqask"}]
    return "zqsystem" in (render(turns, add_generation_prompt=True) or "")


def syntax_of(render: Renders) -> CallSyntax | None:
    """The syntax of a template that shows functions; None for one that is no text around names and JSON objects."""
    lead, ends = _around_text(render)
    one = _answer(render, 1, ends)
    if one is None:
        return None
    begin, middle, end, arguments = one
    begin = begin.removeprefix(lead)
    between = None
    two = _answer(render, 2, ends)
    if two is not None and two[0].removeprefix(lead) == begin and two[2] == end:
        # `middle` of two calls reaches from the first name to the arguments of the second.
        start, _, rest = two[1].partition("zqarguments")
        found, name, last = rest.partition("zqother")
        between = found if name and start == last == middle else None
    pieces = begin + middle + end + (between or "")
    is_recognizable = begin.strip() and not NAME_CHARACTER.match(middle) and middle
    if not is_recognizable or "zq" in pieces:
        return None
    opening, key, item, other_key, closing = arguments.groups()
    is_indented = "\n" in arguments[0] or opening or closing or key != other_key
    return CallSyntax(begin, middle, between, end, None if is_indented else (item, key))


def _tool(name: str) -> dict[str, Any]:
    properties = {"zqkey": {"type": "string", "description": "zqpurpose"}}
    parameters = {"type": "object", "properties": properties, "required": ["zqkey"]}
    function = {"name": name, "description": "zqpurpose", "parameters": parameters}
    return {"type": "function", "function": function}


def _called(count: int) -> dict[str, Any]:
    calls = [
        {
            "id": f"zqcall00{number}",
            "type": "function",
            "function": {"name": name, "arguments": dict(ARGUMENTS)},
        }
        for number, name in zip(range(count), ("zqfunction", "zqother"), strict=False)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _around_text(render: Renders) -> tuple[str, str]:
    """The text that a template writes before and after an answer of plain text."""
    turns = [{"role": "user", "content": "zqask"}]
    answer = {"role": "assistant", "content": "zqresult"}
    tools = [_tool("zqfunction")]
    before = render(turns, add_generation_prompt=True, tools=tools) or ""
    whole = render([*turns, answer], add_generation_prompt=False, tools=tools) or ""
    start, _, end = whole.rpartition("zqresult")
    return start.removeprefix(before) if start.startswith(before) else "", end


def _answer(render: Renders, count: int, ends: str) -> tuple[str, str, str, re.Match[str]] | None:
    """The text of an answer before the first name, between it and the last arguments, after these, and these."""
    asked = [{"role": "user", "content": "zqask"}]
    tools = [_tool("zqfunction"), _tool("zqother")]
    before = render(asked, add_generation_prompt=True, tools=tools)
    whole = render([*asked, _called(count)], add_generation_prompt=False, tools=tools)
    if before is None or whole is None or not whole.startswith(before) or not whole.endswith(ends):
        return None
    answer = whole[len(before) : len(whole) - len(ends)]
    begin, found, rest = answer.partition("zqfunction")
    arguments = SPELLED.search(rest)
    if not found or arguments is None:
        return None
    middle, _, end = rest.rpartition(arguments[0])
    return begin, middle.replace(arguments[0], "zqarguments"), end, arguments
