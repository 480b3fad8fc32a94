"""A template can name a long value a thousand times: the text is refused before it is made."""

import io
import tracemalloc
from typing import Any

import pytest

from tests.unit.evaluation.test_graders import READ, grader, item
from tuneship.contract.lines.dataset_lines import LINE_LIMIT_BYTES, decode_line
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.reading_lines import lines_up_to, numbered
from tuneship.contract.openai.eval_templates import line_of
from tuneship.evaluation.graders import AnswerToScore
from tuneship.evaluation.items import MetadataRefused
from tuneship.evaluation.templates import MAXIMUM_CHARACTERS, check_texts

MEBI = 1 << 20
LONG: dict[str, Any] = {"text": "x" * MEBI, "list": ["y" * MEBI]}
ANSWER = "{{sample.output_text}}"


def turns(*templates: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": one} for one in templates]


@pytest.mark.parametrize(
    ("messages", "reference"),
    [
        (turns("{{item.text}}" * 900), "-"),
        (turns("{{item.list}} " * 9), "-"),
        (turns(*["{{item.text}}"] * 900), "-"),
        (turns("?"), "{{item.text}}" * 900),
    ],
)
def test_a_line_of_an_eval_that_would_be_too_long_is_refused_before_it_is_made(
    messages: list[dict[str, str]], reference: str
) -> None:
    tracemalloc.start()
    with pytest.raises(ExampleProblem) as refused:
        line_of(LONG, messages, [(ANSWER, reference)])
    assert tracemalloc.get_traced_memory()[1] < 16 * MEBI
    tracemalloc.stop()
    problem = refused.value
    assert (problem.code, problem.field) == ("line_too_long", "item")
    assert problem.message == "makes a line of more than 8 MiB"


def test_a_line_may_name_a_long_value_as_often_as_a_line_has_room() -> None:
    made = line_of({"text": "x" * MEBI}, turns("{{item.text}}" * 8), [(ANSWER, "-")])
    assert made["messages"][0]["content"] == "x" * LINE_LIMIT_BYTES


def test_a_grader_whose_text_of_a_line_is_too_long_is_named_with_the_line() -> None:
    graders = READ.validate_python(
        [
            {"name": "a", "type": "tool_calls"},
            {"name": "b", "type": "string_check", "reference": "{{item.metadata.m}}" * 9},
        ]
    )
    short = "m" * (MAXIMUM_CHARACTERS // 9)
    items = [item("", metadata=one) for one in ({}, {"m": short}, {"m": short + "mm"})]
    check_texts(items[:2], graders)
    with pytest.raises(MetadataRefused) as refused:
        check_texts(items, graders)
    found = refused.value
    assert (found.code, found.field, found.example) == ("out_of_range", "graders[1].reference", 2)


def test_an_answer_that_makes_a_text_too_long_scores_0() -> None:
    made = grader(type="string_check", input=ANSWER * 400, reference="{{item.reference}}")
    assert made.score(item("xx" * 400), AnswerToScore("xx")).value == 1.0
    long = "x" * (MAXIMUM_CHARACTERS // 400 + 1)
    assert made.score(item(long * 400), AnswerToScore(long)).value == 0.0


def test_a_line_that_is_too_long_is_read_in_its_beginning_alone() -> None:
    file = io.BytesIO(b"\xef\xbb\xbfab\n\n" + b"c" * 100_000 + b"\r\nabcd\r\nabcd")
    found = list(numbered(lines_up_to(file, 4)))
    assert found == [(1, b"ab\n"), (3, b"c" * 6), (4, b"abcd\r\n"), (5, b"abcd")]
    with pytest.raises(ExampleProblem) as refused:
        decode_line(b" " * (LINE_LIMIT_BYTES + 1))
    assert refused.value.code == "line_too_long"
    with pytest.raises(ExampleProblem) as refused:
        decode_line(b" " * LINE_LIMIT_BYTES + b"\r\n")
    assert refused.value.code == "invalid_json"
