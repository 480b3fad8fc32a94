"""Calls are read out of an answer alike, however it is cut into pieces."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.prompts.test_tool_syntax import HERMES
from tuneship.contract.schemas.tools import WrittenCall
from tuneship.prompts.tool_syntax import CallSyntax
from tuneship.service.generation.call_reader import CallReader
from tuneship.serving.sampling.grammar import accepts, grammar_of_calls

BARE = CallSyntax('{"name": "', '", "parameters": ', None, "}")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "look_up"]), ARGUMENTS), max_size=3)


def written(calls: list[tuple[str, dict[str, object]]], syntax: CallSyntax) -> str:
    if not calls:
        return ""
    middle = [
        f"{name}{syntax.middle}{json.dumps(arguments, ensure_ascii=False)}"
        for name, arguments in calls
    ]
    return syntax.begin + (syntax.between or "").join(middle) + syntax.end


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def read_in(reader: CallReader, pieces: list[str]) -> tuple[str, list[WrittenCall]]:
    """The text and the calls, put together from what the pieces gave."""
    given = [
        *(reader.feed(piece) for piece in pieces),
        reader.feed("", is_last=True),
    ]
    calls: list[WrittenCall] = []
    for call in (call for piece in given for call in piece.calls):
        if call.id is not None:
            assert call.index == len(calls)
            calls.append(call)
            continue
        assert call.index == len(calls) - 1
        longer = calls[-1].function.arguments + call.function.arguments
        function = calls[-1].function.model_copy(update={"arguments": longer})
        calls[-1] = calls[-1].model_copy(update={"function": function})
    text = "".join(piece.text for piece in given)
    assert text == reader.text
    assert [(call.id, call.function) for call in reader.calls] == [
        (call.id, call.function) for call in calls
    ]
    return text, calls


@given(
    st.sampled_from(["", "I look.", "a < b <tool", "x \n y"]),
    st.sampled_from(["", " ", "\n\n"]),
    CALLS,
    st.lists(st.integers(0, 999), max_size=12),
)
def test_an_answer_is_text_and_then_calls(
    text: str, space: str, calls: list[tuple[str, dict[str, object]]], places: list[int]
) -> None:
    whole = text + space + written(calls, HERMES) if calls else text
    reader = CallReader(HERMES, is_text_before=True)
    read, found = read_in(reader, cut(whole, places))
    assert read == text
    assert [(one.function.name, json.loads(one.function.arguments)) for one in found] == calls
    assert reader.is_complete


@given(CALLS.filter(bool), st.integers(0, 999))
def test_an_answer_that_is_cut_is_not_complete(
    calls: list[tuple[str, dict[str, object]]], place: int
) -> None:
    whole = written(calls, HERMES)
    size = place % len(whole)
    reader = CallReader(HERMES, needs_call=True)
    text, found = read_in(reader, [whole[:size]])
    assert text == ""
    # Between two calls the answer could have ended.
    complete = [written(calls[:count], HERMES) for count in range(1, len(calls))]
    assert reader.is_complete == (whole[:size] in complete)
    assert len(found) <= len(calls)
    for one, (name, arguments) in zip(found, calls, strict=False):
        assert one.function.name == name
        assert json.dumps(arguments, ensure_ascii=False).startswith(one.function.arguments)


@pytest.mark.parametrize(
    ("answer", "text", "names"),
    [
        ('{"name": "f", "parameters": {"a": "}"}}', "", ["f"]),
        ("no call", "no call", []),
        ('{"na', '{"na', []),
        ('see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', []),
    ],
)
def test_calls_without_a_mark_are_recognized_by_the_beginning(
    answer: str, text: str, names: list[str]
) -> None:
    for pieces in ([answer], [*answer]):
        read, calls = read_in(CallReader(BARE), pieces)
        assert read == text
        assert [call.function.name for call in calls] == names


EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = {"f": EMPTY, "look_up": CITY}
ONE = written([("f", {})], HERMES)
WRONG = [
    written([call], HERMES) for call in [("g", {}), ("f", dict[str, object](a=1)), ("look_up", {})]
]
TWO = written([("f", {}), ("look_up", {"city": "<tool_call>"})], HERMES)


@pytest.mark.parametrize(
    ("otherwise", "is_parallel", "taken", "refused"),
    [
        ("text", True, ["", "hi", ONE, "hi\n" + TWO], [ONE + " hi", "hi <tool_call>", *WRONG]),
        ("text", False, ["hi", ONE], [TWO]),
        (None, True, [ONE, TWO], ["", "hi", "hi " + ONE]),
        (CITY, True, [ONE, '{"city": "a"}'], ["hi", '{"city": 1}', '{"city": "a"}' + ONE]),
    ],
)  # fmt: skip
def test_the_grammar_allows_what_the_request_allows(
    otherwise: object, is_parallel: bool, taken: list[str], refused: list[str]
) -> None:
    grammar = grammar_of_calls(
        HERMES, FUNCTIONS, {}, otherwise=otherwise, is_parallel=is_parallel  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    assert [text for text in taken if not accepts(grammar, text)] == []
    assert [text for text in refused if accepts(grammar, text)] == []


def test_the_grammar_of_calls_without_a_mark_tells_text_by_its_first_character() -> None:
    grammar = grammar_of_calls(BARE, FUNCTIONS, {}, otherwise="text", is_parallel=True)
    assert accepts(grammar, 'a {"name": "f"')
    assert accepts(grammar, "")
    assert accepts(grammar, '{"name": "f", "parameters": {}}')
    assert not accepts(grammar, '{"name": "f"}')
