"""Lines as prompts and references, templates, the examples that are chosen, their slices, and leaks."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneship.contract.generation import Generate
from tuneship.contract.lines.dataset_lines import parse_example
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.line_fields import DatasetFormat
from tuneship.evaluation.items import EvaluationItem, MetadataRefused, read_item
from tuneship.evaluation.leaks import hash_of, leaked_lines
from tuneship.evaluation.selection import select
from tuneship.evaluation.slices import read_clusters, read_slices
from tuneship.evaluation.texts import said, squeezed


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def asked(question: str, answer: str, **more: Any) -> EvaluationItem:
    return read_item({"instruction": question, "response": answer, **more}, "instruction")


def test_an_instruction_is_the_prompt_and_its_response_the_reference() -> None:
    found = read_item(
        line(
            instruction="Chapter?",
            input="H25.9",
            system="Be short.",
            response="Eye",
            metadata={"site": "A"},
        ),
        "instruction",
    )
    assert found == EvaluationItem(
        (
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Chapter?\n\nH25.9"},
        ),
        "Eye",
        metadata={"site": "A"},
    )
    assert found.messages == list(found.prompt)


def test_the_last_turn_of_a_conversation_is_the_reference() -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    found = read_item(line(messages=turns, metadata='{"site": "B"}'), "conversation")
    assert (found.reference, found.metadata) == ("d", {"site": "B"})
    assert [turn["content"] for turn in found.messages] == ["a", "b", "c"]
    assert all(turn.keys() == {"role", "content"} for turn in found.messages)


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def called(arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"function": {"name": "look_up", "arguments": json.dumps(arguments)}, **more}


def test_calls_before_the_answer_are_asked_as_requests_have_them() -> None:
    turns = [
        {"role": "user", "content": "Is H25.9 valid?"},
        {
            "role": "assistant",
            "tool_calls": [called({"code": "é"}), called({"code": "1"}, id="mine")],
        },
        {"role": "tool", "tool_call_id": "mine", "content": "no"},
        {"role": "tool", "content": "yes"},
        {"role": "assistant", "tool_calls": [called({"code": "2"})]},
    ]
    found = read_item(line(messages=turns, tools=[TOOL]), "conversation")
    assert (found.reference, found.tools) == ("", (TOOL,))
    assert found.calls[0]["function"] == {"name": "look_up", "arguments": {"code": "2"}}
    read = Generate.model_validate({"messages": found.messages, "tools": list(found.tools)})
    assert read.messages is not None
    calls = read.messages[1].tool_calls
    assert calls is not None
    assert calls[0].function.arguments == '{"code": "é"}'
    ids = [call.id for call in calls]
    assert ids[1] == "mine"
    assert [turn.tool_call_id for turn in read.messages[2:]] == ["mine", ids[0]]


@pytest.mark.parametrize(
    ("content", "dataset_format", "field"),
    [
        (b"{", "instruction", None),
        (line(instruction="x"), "instruction", "response"),
        (line(instruction="x", response="y", metadata=5), "instruction", "metadata"),
        (line(messages=[{"role": "user", "content": "x"}]), "conversation", "messages"),
        (
            line(
                messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
                metadata=[1],
            ),
            "conversation",
            "metadata",
        ),
    ],
)
def test_a_bad_line_is_refused_by_its_field(
    content: bytes, dataset_format: DatasetFormat, field: str | None
) -> None:
    with pytest.raises(ExampleProblem) as refused:
        read_item(content, dataset_format)
    assert refused.value.field == field


# The choice.


def test_the_choice_is_the_same_with_every_version_of_python() -> None:
    assert select(10, 10, 0) == [8, 7, 5, 4, 1, 3, 9, 2, 0, 6]
    assert select(5_000_000, 5, 7) == [1619163, 754246, 3254673, 362184, 2679411]


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_the_choice_has_each_example_once(examples: int, most: int, seed: int) -> None:
    chosen = select(examples, most, seed)
    assert len(chosen) == min(examples, most) == len(set(chosen))
    assert set(chosen) <= set(range(examples))
    assert chosen == select(examples, examples + 1, seed)[:most]


def test_every_example_is_as_likely_at_every_place() -> None:
    found = Counter(pair for seed in range(4000) for pair in enumerate(select(4, 3, seed)))
    assert len(found) == 12
    # 1,000 each, with a standard deviation of 27.
    assert all(900 < number < 1100 for number in found.values())


# Slices and clusters.


def test_slices_are_labels_of_metadata() -> None:
    metadata = [{"site": "Ward 3/a-b_c.d", "age": 7}, {"age": True}, {"site": None, "age": False}]
    assert read_slices(metadata, ["site", "age"]) == [
        {"site": "Ward 3/a-b_c.d", "age": "7"},
        {"site": "(none)", "age": "true"},
        {"site": "(none)", "age": "false"},
    ]
    assert read_slices(metadata, []) == [{}, {}, {}]


@pytest.mark.parametrize("value", ["", "x" * 65, "a\n", "é", "(none)", 1.5, ["a"], {"a": 1}])
def test_a_value_that_is_no_label_is_refused_with_its_example(value: Any) -> None:
    with pytest.raises(MetadataRefused) as refused:
        read_slices([{"a": "x", "site": "A"}, {"site": value}], ["a", "site"])
    found = refused.value
    assert (found.code, found.field, found.example) == ("invalid_slice", "slice_by[1]", 1)
    assert "é" not in found.message


def test_a_field_that_no_line_has_is_refused() -> None:
    for read in (lambda: read_slices([{"a": 1}], ["b"]), lambda: read_clusters([{"a": 1}], "b")):
        with pytest.raises(MetadataRefused) as refused:
            read()
        assert refused.value.code == "missing_field"


def test_the_fields_have_at_most_fifty_slices_together() -> None:
    metadata = [{"a": str(number), "b": number % 2} for number in range(48)]
    assert read_slices(metadata, ["a", "b"])
    with pytest.raises(MetadataRefused) as refused:
        read_slices([*metadata, {"a": "0"}], ["a", "b"])
    found = refused.value
    assert (found.code, found.field, found.example) == ("too_many_slices", "slice_by[1]", 48)


def test_clusters_have_numbers_and_examples_without_one_stand_alone() -> None:
    metadata = [{"p": "x"}, {}, {"p": 1}, {"p": "x"}, {}, {"p": "1"}, {"p": True}]
    assert read_clusters(metadata, "p") == [0, 1, 2, 0, 3, 4, 5]
    with pytest.raises(MetadataRefused) as refused:
        read_clusters([{"p": [1]}], "p")
    assert (refused.value.code, refused.value.example) == ("invalid_slice", 0)


# Leaks.


@pytest.mark.parametrize(
    ("question", "answer", "is_leaked"),
    [
        ("Fracture of rib?", "Injury", True),
        ("fracture  OF\nrib", "injury.", True),
        ("\uff26racture of rib?", "Injury", True),
        ("Fracture of ribs?", "Injury", False),
        ("Fracture of rib?", "Eye", False),
        ("Fracture of", "rib? Injury", False),
    ],
)
def test_a_row_leaks_if_its_words_stand_in_a_training_row(
    question: str, answer: str, is_leaked: bool
) -> None:
    row = {"instruction": question, "response": answer, "system": "Another system."}
    training = [parse_example(row, "instruction")]
    examples = {7: asked("Fracture of rib?", "Injury"), 9: asked("Cataract?", "Eye")}
    assert leaked_lines(examples, training) == ({7} if is_leaked else set())


def test_a_row_leaks_from_the_middle_of_a_conversation_that_was_learnt() -> None:
    def training(weight: int) -> list[Any]:
        turns = [
            {"role": "user", "content": "Fracture of rib?"},
            {"role": "assistant", "content": "Injury", "weight": weight},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes"},
        ]
        return [parse_example({"messages": turns}, "conversation")]

    examples = {
        1: asked("Fracture of rib?", "Injury"),
        2: asked("Sure?", "Yes"),
        3: asked("fracture of rib", "injury"),
    }
    assert leaked_lines(examples, training(1)) == {1, 3}
    assert leaked_lines(examples, training(0)) == set()


def test_an_answer_of_calls_leaks_by_their_arguments() -> None:
    def turns(code: str) -> list[dict[str, Any]]:
        call = {"function": {"name": "look_up", "arguments": json.dumps({"code": code})}}
        return [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]

    examples = {1: read_item({"messages": turns("H25")}, "conversation")}
    for code, found in (("H25", {1}), ("H26", set[int]())):
        assert (
            leaked_lines(examples, [parse_example({"messages": turns(code)}, "conversation")])
            == found
        )


def test_a_hash_has_eight_bytes() -> None:
    hashes = {hash_of(asked(str(number), "x")) for number in range(50)}
    assert len(hashes) == 50
    assert 2**56 < max(hashes) < 2**64


@given(st.text(), st.text(), st.sampled_from([" ", "!", "\n", "", "\u200b"]))
def test_texts_that_say_the_same_are_squeezed_alike(text: str, other: str, between: str) -> None:
    for one in (f"{text}{between}", f"{between}{text}", text.upper(), other):
        if said(one) == said(text):
            assert squeezed(one) == squeezed(text)
    assert bool(squeezed(text)) == bool(text.strip())
