"""Graders: what each score is, on tables and on any text; and what they refuse."""

import json
import random
import re
import string
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from sacrebleu.metrics.chrf import CHRF

from tuneship.contract.graders import Graders
from tuneship.evaluation.graders import (
    AnswerScore,
    AnswerToScore,
    EvaluationItem,
    GraderRefused,
    ReadyGrader,
    read_graders,
)
from tuneship.evaluation.numbers_in_text import TextNumber, last_number
from tuneship.evaluation.patterns import MAXIMUM_ELEMENTS, PatternUnusable, compiled, elements_of
from tuneship.evaluation.similarity import fuzzy_match, rouge_l, token_f1

READ: TypeAdapter[Any] = TypeAdapter(Graders)
EVERY: dict[str, dict[str, Any]] = {
    "eq": {"type": "string_check"},
    "eq as it is": {"type": "string_check", "normalize": "none"},
    "eq of words": {"type": "string_check", "normalize": "text"},
    "like": {"type": "string_check", "operation": "like"},
    "ilike": {"type": "string_check", "operation": "ilike"},
    "ne": {"type": "string_check", "operation": "ne"},
    "rouge_l": {"type": "text_similarity", "evaluation_metric": "rouge_l"},
    "fuzzy_match": {"type": "text_similarity", "evaluation_metric": "fuzzy_match"},
    "token_f1": {"type": "text_similarity", "evaluation_metric": "token_f1"},
    "chrf": {"type": "text_similarity", "evaluation_metric": "chrf"},
    "found": {"type": "regex", "pattern": r"\d+"},
    "group": {"type": "regex", "pattern": "(?s)(.*)"},
    "number": {"type": "number"},
    "json": {"type": "json"},
    "fields": {"type": "json", "fields": ["a", "b"]},
    "schema": {"type": "json", "schema": {"type": "object", "required": ["a"]}},
    "calls": {"type": "tool_calls"},
}
# A reference that is no number, no JSON and has no digit cannot score 1 with these.
OF_ANY_TEXT = [
    "eq",
    "eq as it is",
    "eq of words",
    "like",
    "ilike",
    "rouge_l",
    "fuzzy_match",
    "token_f1",
    "chrf",
    "group",
]


def grader(**fields: Any) -> ReadyGrader:
    (made,) = read_graders(READ.validate_python([{"name": "g", **fields}]))
    return made


READY = {name: grader(**fields) for name, fields in EVERY.items()}


def item(reference: str, **more: Any) -> EvaluationItem:
    return EvaluationItem(({"role": "user", "content": "?"},), reference, **more)


def score(made: ReadyGrader, answer: str, reference: str) -> float:
    return made.score(item(reference), AnswerToScore(answer)).value


@pytest.mark.parametrize(
    ("name", "answer", "reference", "right"),
    [
        ("eq", " Injury,\n of rib ", "Injury, of rib", 1),
        ("eq", "injury, of rib", "Injury, of rib", 0),
        ("eq as it is", "yes ", "yes", 0),
        ("eq of words", "YES - it is.", "yes, it is!", 1),
        ("eq of words", "ﬁne", "FINE", 1),
        ("eq of words", "it's", "its", 0),
        ("eq of words", "!!!", "???", 0),
        ("ne", "no", "yes", 1),
        ("ne", "yes", "yes", 0),
        ("ne", " ", "yes", 0),
        ("like", "It is H25.9, I think", "H25.9", 1),
        ("like", "It is h25.9", "H25.9", 0),
        ("ilike", "It is h25.9", "H25.9", 1),
        ("like", "anything", "", 0),
        ("ilike", "anything", " ", 0),
        ("found", "code 12", "whatever", 1),
        ("found", "no code", "whatever", 0),
        ("number", "so the sum is 1,234.50 dollars", "1234.5", 1),
        ("number", "first 3, then 4", "3", 0),
        ("number", "45 %", "0.45", 1),
        ("number", "45 %", "45", 1),
        ("number", "0.45", "45%", 1),
        ("number", "45 %", "4.5 %", 0),
        ("number", "none", "3", 0),
        ("number", "3", "none", 0),
        ("json", '{"a": 1}', "", 1),
        ("json", "[1, 2", "", 0),
        ("json", '{"a": NaN}', "", 0),
        ("json", "```json\n{}\n```", "", 0),
        ("fields", '{"a": 1.0, "b": "x"}', '{"a": 1, "b": "y"}', 0.5),
        ("fields", '{"a": true}', '{"a": 1}', 0.5),
        ("fields", '{"b": {"d": 2, "c": [1]}}', '{"b": {"c": [1.0], "d": 2}}', 1),
        ("fields", '{"a": null, "b": 1}', '{"b": 1}', 0.5),
        ("fields", "[1]", '{"a": 1}', 0),
        ("fields", "{}", "no JSON", 0),
        ("schema", '{"a": null}', "", 1),
        ("schema", "{}", "", 0),
    ],
)
def test_a_score_is_as_the_table_says(name: str, answer: str, reference: str, right: float) -> None:
    assert score(READY[name], answer, reference) == right


def test_a_threshold_makes_0_or_1_of_a_share() -> None:
    similar = {"type": "text_similarity", "evaluation_metric": "token_f1", "pass_threshold": 0.5}
    assert score(grader(**similar), "one two", "one three") == 1.0
    assert score(grader(**similar), "one two", "three four") == 0.0
    shares = {"type": "json", "fields": ["a", "b"], "pass_threshold": 0.6}
    assert score(grader(**shares), '{"a": 1}', '{"a": 1, "b": 2}') == 0.0


@pytest.mark.parametrize(
    ("fields", "answer", "right"),
    [
        ({"tolerance": 0.5}, "10.5", 1),
        ({"tolerance": 0.5}, "10.6", 0),
        ({"relative": 0.1}, "11", 1),
        ({"relative": 0.1}, "11.1", 0),
        ({}, "10.0000001", 0),
    ],
)
def test_a_number_may_differ_by_its_tolerance(
    fields: dict[str, float], answer: str, right: float
) -> None:
    assert score(grader(type="number", **fields), answer, "10") == right


def test_the_first_group_of_a_pattern_is_compared() -> None:
    made = grader(type="regex", pattern=r"Chapter: (\w+)(?: (\w+))?")
    assert score(made, "Chapter: Injury of", " Injury\n") == 1.0
    assert score(made, "Chapter: Eye", "Injury") == 0.0
    assert score(made, "none", "Injury") == 0.0
    optional = grader(type="regex", pattern="a|(b)")
    assert score(optional, "a", "b") == 0.0


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([call("b", "{}"), call("a", '{"y": [1.0], "x": "1"}', id="call_9")], 1),
        ([call("b", {}), call("a", {"x": "1", "y": [1]})], 1),
        ([call("a", {"x": "1", "y": [1]})], 0),
        ([call("b", {}), call("b", {}), call("a", {"x": "1", "y": [1]})], 0),
        ([call("b", {}), call("a", {"x": 1, "y": [1]})], 0),
        ([call("b", "no JSON"), call("a", {"x": "1", "y": [1]})], 0),
        ([], 0),
    ],
)
def test_calls_are_equal_in_any_order(calls: list[dict[str, Any]], right: float) -> None:
    wanted = item("", calls=(call("a", {"x": "1", "y": [1]}), call("b", {})))
    assert READY["calls"].score(wanted, AnswerToScore("", calls)).value == right
    assert READY["calls"].score(item("text"), AnswerToScore("text")).value == 1.0


def test_templates_choose_what_is_compared() -> None:
    made = grader(
        type="string_check",
        input="{{ item.metadata.site }}: {{sample.output_text}}",
        reference="A: {{item.reference}}{{item.metadata.more}}",
    )
    assert made.fields == {"site", "more"}
    answer = AnswerToScore("yes")
    assert made.score(item("yes", metadata={"site": "A", "more": ""}), answer).value == 1.0
    assert made.score(item("ye", metadata={"site": "A", "more": "s"}), answer).value == 1.0
    assert made.score(item("yes", metadata={"site": "A"}), answer).value == 0.0
    as_json = grader(type="string_check", reference="{{item.metadata.m}}", normalize="none")
    assert as_json.score(item("", metadata={"m": [1, "é"]}), AnswerToScore('[1, "é"]')).value == 1.0
    # What an answer says is never a template.
    odd = AnswerToScore("{{item.reference}}")
    assert READY["eq"].score(item("yes"), odd).value == 0.0


# Laws.


@given(st.text(), st.text(), st.sampled_from(list(EVERY)))
def test_every_text_has_a_score_from_0_to_1(answer: str, reference: str, name: str) -> None:
    found = READY[name].score(item(reference), AnswerToScore(answer))
    assert 0.0 <= found.value <= 1.0
    assert not found.timed_out
    if not answer.strip():
        assert found.value == 0.0


@given(st.text(min_size=1), st.sampled_from(OF_ANY_TEXT))
def test_a_reference_against_itself_scores_1(reference: str, name: str) -> None:
    assume(reference.strip())
    assert score(READY[name], reference, reference) == 1.0


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from("abc"), JSON))
def test_json_against_itself_scores_1(value: dict[str, Any]) -> None:
    text = json.dumps(value)
    assume("\\u0000" not in text)
    assert score(READY["json"], text, text) == 1.0
    assert score(READY["fields"], text, json.dumps(value, indent=1)) == 1.0
    mine = item("", calls=(call("f", value),))
    assert READY["calls"].score(mine, AnswerToScore("", [call("f", text)])).value == 1.0


@given(st.integers() | st.floats(allow_nan=False), st.text())
def test_a_number_against_itself_scores_1(number: float, before: str) -> None:
    assume(str(number) != "inf" and str(number) != "-inf")
    text = f"{before} {number}"
    assert score(READY["number"], text, str(number)) == 1.0


@pytest.mark.parametrize(
    ("text", "value", "is_percent"),
    [
        ("12,345", 12345.0, False),
        ("1.234,56", 1234.56, False),
        ("1,234.56", 1234.56, False),
        ("0,234", 0.234, False),
        ("12345,678", 12345.678, False),
        ("3,14", 3.14, False),
        ("1.234.567", 1234567.0, False),
        ("1'000", 1000.0, False),
        ("1 000", 0.0, False),
        ("1\u202f000\u00a0%", 1000.0, True),
        ("59.3 %", 59.3, True),
        ("in 2020.", 2020.0, False),
        ("from -5", -5.0, False),
        ("from \u22125", -5.0, False),
        ("2026-11-29", 29.0, False),
        ("29.11.2026", 2026.0, False),
        ("1,2,3", 3.0, False),
        ("-1e-3", -0.001, False),
        ("1.5E3", 1500.0, False),
        ("1e", 1.0, False),
    ],
)
def test_a_number_is_read_as_people_write_it(text: str, value: float, is_percent: bool) -> None:
    assert last_number(text) == TextNumber(value, is_percent)


@pytest.mark.parametrize("text", ["", "none", "½", "٣", "%"])
def test_a_text_without_digits_has_no_number(text: str) -> None:
    assert last_number(text) is None


# The measures against straightforward ones.


def longest_common(one: list[str], other: list[str]) -> int:
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for place, wanted in enumerate(other, 1):
            diagonal, row[place] = (
                row[place],
                (diagonal + 1 if word == wanted else max(row[place], row[place - 1])),
            )
    return row[-1]


WORDS = st.lists(
    st.sampled_from(["the", "A", "rib", "Rib,", "of", "fracture.", "é", "x_1"]), max_size=12
)


@given(WORDS, WORDS)
def test_rouge_l_is_f1_of_the_longest_common_subsequence(one: list[str], other: list[str]) -> None:
    answer, reference = " ".join(one), " ".join(other)
    words, wanted = (re.findall(r"\w+", text.lower()) for text in (answer, reference))
    common = longest_common(words, wanted)
    if not common:
        assert rouge_l(answer, reference) == float(not words and not wanted)
        return
    precision, recall = common / len(words), common / len(wanted)
    right = 2 * precision * recall / (precision + recall)
    assert rouge_l(answer, reference) == pytest.approx(right)


def squad_f1(prediction: str, truth: str) -> float:
    """Token F1 as the evaluation script of SQuAD 1.1 and 2.0 computes it."""

    def words(text: str) -> list[str]:
        bare = "".join(one for one in text.lower() if one not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split()).split()

    one, other = words(prediction), words(truth)
    common = sum((Counter(one) & Counter(other)).values())
    if not one or not other:
        return float(one == other)
    if not common:
        return 0.0
    precision, recall = common / len(one), common / len(other)
    return 2 * precision * recall / (precision + recall)


@given(WORDS, WORDS)
def test_token_f1_is_that_of_squad(one: list[str], other: list[str]) -> None:
    answer, reference = " ".join(one), " ".join(other)
    assert token_f1(answer, reference) == pytest.approx(squad_f1(answer, reference))


@given(st.text(max_size=20), st.text(max_size=20))
def test_fuzzy_match_is_the_share_of_characters_that_stay(one: str, other: str) -> None:
    common = longest_common(list(one), list(other))
    right = 2 * common / (len(one) + len(other)) if one or other else 1.0
    assert fuzzy_match(one, other) == pytest.approx(right)


def test_chrf_is_that_of_sacrebleu() -> None:
    one, other = "fracture of the left rib", "fracture of the right rib"
    right = CHRF().sentence_score(one, [other]).score / 100
    assert score(READY["chrf"], one, other) == pytest.approx(right)
    assert 0.5 < right < 1.0


def test_chrf_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics.chrf", None)
    with pytest.raises(GraderRefused) as refused:
        grader(**EVERY["chrf"])
    assert refused.value.place == "graders[0].evaluation_metric"
    assert "extra evaluation" in refused.value.message


# Time and memory.


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "regex", "pattern": "(a|aa)+$"},
        {"type": "json", "schema": {"items": {"pattern": "(a|aa)+$"}}},
    ],
)
def test_a_pattern_that_never_ends_is_ended(fields: dict[str, Any]) -> None:
    text = "a" * 60 + "!"
    answer = AnswerToScore(json.dumps([text]) if fields["type"] == "json" else text)
    made, began = grader(**fields), time.thread_time()
    assert made.score(item(""), answer) == AnswerScore(0.0, timed_out=True)
    # A tenth of a second of the processor, and what it takes to notice.
    assert time.thread_time() - began < 0.3


def test_references_that_multiply_are_ended() -> None:
    doubled = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"$defs": {**doubled, "d40": {}}, "$ref": "#/$defs/d0"}
    found = grader(type="json", schema=schema).score(item(""), AnswerToScore("{}"))
    assert found == AnswerScore(0.0, timed_out=True)


@pytest.mark.parametrize(
    ("schema", "answer", "right"),
    [
        ({"$ref": "#"}, "{}", 0),
        ({"uniqueItems": True}, "[1, 1.0]", 0),
        ({"uniqueItems": True}, '[1, true, "1", [1], {"a": 1}]', 1),
        ({"uniqueItems": False}, "[1, 1]", 1),
        ({"multipleOf": 0.1}, "1" + "0" * 400, 0),
        ({"pattern": "^a+$"}, '"aaa"', 1),
        ({"pattern": "^a+$"}, '"b"', 0),
        ({"pattern": "^a+$"}, "5", 1),
        (
            {"$defs": {"a/b~": {"allOf": [{"type": "null"}]}}, "$ref": "#/$defs/a~1b~0/allOf/0"},
            "null",
            1,
        ),
        (
            {
                "$id": "https://example.org/x",
                "properties": {"a": {"$ref": "#/$defs/b"}},
                "$defs": {"b": {"const": 1}},
            },
            '{"a": 2}',
            0,
        ),
    ],
)
def test_a_schema_judges_by_its_keywords(schema: dict[str, Any], answer: str, right: float) -> None:
    assert score(grader(type="json", schema=schema), answer, "") == right


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "https://example.org/schema"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#name"},
        {"anyOf": [{}], "$ref": "#/anyOf/1"},
        {"$anchor": "name"},
        {"patternProperties": {"(a|aa)+$": {}}},
        {"properties": {"x": {"pattern": "("}}},
        {"anyOf": [{"pattern": f"a{{{n}}}"} for n in range(4000, 4004)]},
        {"const": "x" * 65_536},
        nested(300),
        nested(20_000),
        {"const": 10**5000},
    ],
    ids=[
        "type",
        "elsewhere",
        "missing",
        "by name",
        "index",
        "anchor",
        "properties by pattern",
        "no pattern",
        "patterns together",
        "size",
        "depth",
        "far too deep",
        "digits",
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_by_its_place(schema: dict[str, Any]) -> None:
    with pytest.raises(GraderRefused) as refused:
        grader(type="json", schema=schema)
    assert refused.value.place == "graders[0].schema"


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "[",
        "((a{1000}){1000}){1000}",
        "a{1000000000}",
        "(?x) (a{1000} ) {1000}",
        "(?R)?a",
        "(a(?1)?b)*",
        "(?P<n>a(?&n)?)",
        "(?ix-s:a)",
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused_by_its_place(pattern: str) -> None:
    right = {"name": "a", "type": "number"}
    graders = READ.validate_python([right, {"name": "b", "type": "regex", "pattern": pattern}])
    with pytest.raises(GraderRefused) as refused:
        read_graders(graders)
    assert refused.value.place == "graders[1].pattern"
    assert pattern not in refused.value.message


def test_usual_patterns_are_small() -> None:
    digits = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    for pattern in (
        digits,
        r"(\d{1,3}\.){3}\d{1,3}",
        ".{0,2000}x",
        "(?:ab){0,100000}",
        "(?i)(?<=x)yes|no",
    ):
        assert elements_of(pattern) < 1000
        assert compiled(pattern)


@given(
    st.lists(
        st.sampled_from(["a", "(?:", ")", "{30}", "{2,}", "{,9}", "[b)]", "|", "\\)", "{200}"]),
        max_size=12,
    )
)
def test_the_elements_of_a_pattern_are_never_too_few(pieces: list[str]) -> None:
    pattern = "".join(pieces)
    assume(elements_of(pattern) <= MAXIMUM_ELEMENTS)
    try:
        found = compiled(pattern)
    except PatternUnusable:
        return
    # The shortest text that fits has as many characters as the pattern written out, or fewer.
    assert not found.fullmatch("a" * (elements_of(pattern) + 1) + "!")


def test_large_texts_are_compared() -> None:
    dice = random.Random(1)  # noqa: S311 - no secret
    long = " ".join(dice.choice(["rib", "of", "the", "x"]) for _ in range(20_000))
    for name in ("rouge_l", "fuzzy_match", "token_f1"):
        assert 0.5 < score(READY[name], long[::-1] + long, long) < 1.0
