"""Grammars of schemas, without a model: random texts that they allow fit the schema; none overflows the compiler."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tuneship.contract.schemas.answer_schemas import read_schema
from tuneship.contract.schemas.schema_keywords import FORMATS
from tuneship.serving.sampling.grammar import LIMITS, accepts, grammar_of, is_usable, spellings

BYTES = LLTokenizer("byte")
LONGEST_WALK = 300
# What closes a part of a JSON text, or may end one.
CLOSING = b'"]},:0123456789'

NAMES = st.sampled_from(["a", "b", "ü", "a b", 'q"', "\\", "n\n", ""])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 1000)
    | st.sampled_from([0.5, -2.25, 1e10, "", "a", 'é"', "\u0001", "😀", "x\ny", "\u2028"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


TEXTS = (
    some(minLength=st.integers(0, 4), maxLength=st.integers(3, 9)).map(lambda one: {"type": "string", **one})
    | st.sampled_from(["^a+$", "[a-c]{2}", "^[0-9]{3}-[0-9]{2}$", "^(foo|bar)?$", "x.y", "^[^b]*$", "^$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    )
    | st.sampled_from(sorted(FORMATS)).map(lambda name: {"type": "string", "format": name})
)  # fmt: skip
NUMBERS = st.builds(
    lambda kind, limits: {"type": kind, **limits},
    st.sampled_from(["integer", "number"]),
    some(
        minimum=st.integers(-50, 20) | st.sampled_from([-1.5, 0.25]),
        maximum=st.integers(20, 99),
        exclusiveMinimum=st.integers(-9, 5),
        exclusiveMaximum=st.sampled_from([50, 7.5]),
        multipleOf=st.sampled_from([1, 2, 5, 7, 0.5, 0.25, 100]),
    ),
)
LEAVES: st.SearchStrategy[dict[str, Any]] = (
    TEXTS
    | NUMBERS
    | VALUES.map(lambda value: {"const": value})
    | st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values})
    | st.sampled_from(
        [{}, {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"], "maxLength": 3}]
    )
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, Any], required: list[str], others: Any) -> dict[str, Any]:
        names = [name for name in required if name in properties or others is not False]
        more = {} if others is None else {"additionalProperties": others}
        return {"type": "object", "properties": properties, "required": names, **more}

    names = st.lists(NAMES, max_size=3, unique=True)
    others = st.sampled_from([None, False, True]) | inner
    return st.builds(made, st.dictionaries(NAMES, inner, max_size=3), names, others)


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    counts = some(minItems=st.integers(0, 2), maxItems=st.integers(2, 4))
    items = st.just({}) | inner.map(lambda one: {"items": one})
    first = st.just({}) | inner.map(lambda one: {"prefixItems": [one]})
    return st.builds(lambda a, b, c: {"type": "array", **a, **b, **c}, counts, items, first)


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    options = st.lists(inner, min_size=1, max_size=3)
    return options.flatmap(
        lambda them: st.sampled_from([{"anyOf": them}, {"oneOf": them}, {"allOf": them[:1]}])
    )


SCHEMAS = st.recursive(
    LEAVES | st.sampled_from([{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/list"}]),
    lambda inner: objects(inner) | arrays(inner) | combined(inner),
    max_leaves=6,
)


def random_answer(grammar: str, seed: int) -> str | None:
    """A text that the grammar allows byte by byte; None for one that gets too long."""
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=LIMITS)
    draw = random.Random(seed)  # noqa: S311 - only for tests
    mask = np.zeros((BYTES.vocab_size + 31) // 32, dtype=np.int32)
    written: list[int] = []
    while len(written) < LONGEST_WALK and not matcher.is_stopped():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert not matcher.is_error()
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits)]
        # What closes a part comes more often, so that most answers end.
        closing = [token for token in allowed if token > 255 or token in CLOSING]
        token = draw.choice(closing if closing and draw.random() < 0.7 else allowed)
        if token == BYTES.eos_token:
            assert matcher.is_accepting()
            break
        written.append(token)
        assert matcher.consume_token(token)
    return bytes(written).decode() if matcher.is_accepting() else None


@given(SCHEMAS, LEAVES, st.integers(0, 9))
def test_every_text_a_grammar_accepts_fits_its_schema(
    part: dict[str, Any], leaf: dict[str, Any], seed: int
) -> None:
    parts = {"leaf": leaf, "list": {"type": "array", "items": {"$ref": "#"}}}
    schema = {**part, "$defs": parts}
    grammar = grammar_of(read_schema(schema).schema)
    if not is_usable(grammar):
        return
    answer = random_answer(grammar, seed)
    if answer is not None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
        assert accepts(grammar, answer)
        assert not accepts(grammar, answer + "x")


@given(VALUES, st.booleans())
def test_json_is_compact_or_spaced_and_indented_only_where_that_is_asked_for(
    value: Any, is_object: bool
) -> None:
    value = {"a": value, "b": [value]} if is_object else [value, value]
    either, flexible = grammar_of({}), grammar_of({}, is_flexible=True)
    compact, spaced = spellings(either)
    assert spellings(flexible) == [flexible]
    written = json.dumps(value, ensure_ascii=False)
    shortest = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    indented = json.dumps(value, ensure_ascii=False, indent=4)
    # A control character has no spelling, as names must have one only.
    if "\\u" not in written:
        assert [accepts(one, written) for one in (either, spaced, compact)] == [True, True, False]
        assert [accepts(one, shortest) for one in (either, spaced, compact)] == [True, False, True]
        assert accepts(flexible, indented)
    assert not any(accepts(one, indented) for one in (either, compact, spaced))
    assert not accepts(flexible, shortest.replace("[", "[" + "\n" * 9, 1))


def test_a_schema_cannot_hold_the_mark_of_a_spelling() -> None:
    mark = grammar_of({}).partition("start: ")[2].strip()
    schema = {"enum": [mark, {"x-guidance": json.loads(mark.removeprefix("%json "))["x-guidance"]}]}
    for grammar in spellings(grammar_of(read_schema(schema).schema)):
        assert accepts(grammar, json.dumps(mark, ensure_ascii=False))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]},
    ],
    ids=str,
)
def test_a_schema_without_answers_is_not_usable(
    schema: dict[str, Any],
) -> None:
    assert not is_usable(grammar_of(read_schema(schema).schema))


AT_THE_LIMITS = Path(__file__).parent / "grammars_at_the_limits.py"


def test_no_schema_within_the_limits_overflows_half_of_a_usual_stack_or_takes_long() -> None:
    """In a process of its own, which an overflow kills, as does the limit of its CPU time."""
    ended = subprocess.run(
        [sys.executable, AT_THE_LIMITS], capture_output=True, text=True, timeout=600, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["chains", "compiled:", "9"]
