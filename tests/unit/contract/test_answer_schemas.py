"""Which schemas an answer can be kept to; everything else is refused by its place, without the caller's words."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneship.contract.schemas.answer_schemas import MAX_SCHEMA_DEPTH, read_schema
from tuneship.contract.schemas.schema_keywords import CHECKS, SUBSCHEMAS, UNSUPPORTED, SchemaRefused

SECRET = "zq planted text 7731"
OBJECT = {"type": "object", "properties": {SECRET: {"type": "string"}}}


def inside(part: Any) -> dict[str, Any]:
    """A schema whose second property is `part`."""
    return {"type": "object", "properties": {"a": {"type": "string"}, SECRET: part}}


SECOND = ".properties[1]"
# The compiler makes one automaton of all multiples that stand in an anyOf; that of two of these has a million states.
MULTIPLES = [{"type": "number", "multipleOf": one} for one in (997, 99.1, 0.983)]
REFUSED: list[tuple[dict[str, Any], str]] = [
    *((inside({name: 1}), f"{SECOND}.{name}") for name in sorted(UNSUPPORTED)),
    (inside({SECRET: 1}), SECOND),
    (inside(SECRET), SECOND),
    (inside({"type": SECRET}), f"{SECOND}.type"),
    (inside({"type": []}), f"{SECOND}.type"),
    (inside({"format": SECRET}), f"{SECOND}.format"),
    (inside({"pattern": 5}), f"{SECOND}.pattern"),
    (inside({"pattern": "a" * 1_001}), f"{SECOND}.pattern"),
    (inside({"maxLength": 1_000_001}), f"{SECOND}.maxLength"),
    (inside({"minItems": -1}), f"{SECOND}.minItems"),
    (inside({"minItems": True}), f"{SECOND}.minItems"),
    (inside({"minimum": SECRET}), f"{SECOND}.minimum"),
    (inside({"maximum": float("inf")}), f"{SECOND}.maximum"),
    (inside({"multipleOf": 0}), f"{SECOND}.multipleOf"),
    (inside({"multipleOf": 1_009}), f"{SECOND}.multipleOf"),
    (inside({"multipleOf": 1e-7}), f"{SECOND}.multipleOf"),
    (inside({"anyOf": MULTIPLES}), f"{SECOND}.anyOf[1].multipleOf"),
    (inside({"prefixItems": [*MULTIPLES, SECRET]}), f"{SECOND}.prefixItems[1].multipleOf"),
    (inside({"enum": []}), f"{SECOND}.enum"),
    (inside({"enum": SECRET}), f"{SECOND}.enum"),
    (inside({"enum": [0] * 1_001}), f"{SECOND}.enum"),
    (inside({"const": [[[[[[[[[]]]]]]]]]}), f"{SECOND}.const"),
    (inside({"required": SECRET}), f"{SECOND}.required"),
    (inside({"properties": []}), f"{SECOND}.properties"),
    (inside({"items": [OBJECT]}), f"{SECOND}.items"),
    (inside({"prefixItems": OBJECT}), f"{SECOND}.prefixItems"),
    (inside({"anyOf": []}), f"{SECOND}.anyOf"),
    (inside({"anyOf": [OBJECT, {"not": OBJECT}]}), f"{SECOND}.anyOf[1].not"),
    (inside({"anyOf": [OBJECT], "type": "object"}), f"{SECOND}.anyOf"),
    (inside({"allOf": [OBJECT, OBJECT]}), f"{SECOND}.allOf"),
    (inside({"$ref": "#", "type": "object"}), f"{SECOND}.$ref"),
    (inside({"$ref": f"#/$defs/{SECRET}"}), f"{SECOND}.$ref"),
    (inside({"$ref": "https://zq.planted.text/7731"}), f"{SECOND}.$ref"),
    (inside({"$ref": "#planted"}), f"{SECOND}.$ref"),
    ({**OBJECT, "$defs": {"a": {"$ref": "#/$defs/a"}}}, ".$defs[0].$ref"),
    ({**OBJECT, "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, ".$defs[0].allOf[0].$ref"),
    ({"properties": {str(number): {} for number in range(251)}}, ".properties"),
    ({"prefixItems": [{}] * 500}, ""),
    ({"enum": ["a" * 70_000]}, ""),
    ({"const": 10**5000}, ""),
    (inside({"multipleOf": 10**5000}), f"{SECOND}.multipleOf"),
]


@pytest.mark.parametrize(
    ("schema", "place"), REFUSED, ids=[str(number) for number in range(len(REFUSED))]
)
def test_a_schema_that_cannot_be_followed_is_refused_with_its_place(
    schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(SchemaRefused) as caught:
        read_schema(schema)
    assert caught.value.place == place
    assert SECRET not in f"{caught.value.place} {caught.value.message}"


def test_a_schema_that_is_too_deep_is_refused_where_it_becomes_so() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(MAX_SCHEMA_DEPTH - 1):
        schema = {"type": "array", "items": schema}
    assert read_schema(schema).schema == schema
    with pytest.raises(SchemaRefused) as caught:
        read_schema({"type": "array", "items": schema})
    assert caught.value.place == ".items" * MAX_SCHEMA_DEPTH


def test_multiples_of_a_usual_schema_are_no_part_of_a_limit() -> None:
    multiples = [0.01, 0.05, 0.25, 0.5, 5, 7, 12, 15, 24, 50, 60, 100, 250, 500, 1_000] * 20
    schema = {"anyOf": [{"type": "number", "multipleOf": one} for one in multiples]}
    assert read_schema(schema).schema == schema


def test_annotations_are_no_part_of_what_is_compiled() -> None:
    plain = {"type": "object", "properties": {"title": {"type": "string"}}}
    annotated = {
        **plain,
        "properties": {"title": {"type": "string", "title": SECRET, "examples": [{"not": 1}]}},
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "description": SECRET,
        "default": None,
    }
    assert read_schema(annotated).schema == plain


def option(kind: str, **more: Any) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, "value": {}}
    return {"type": "object", "properties": properties, "required": ["kind"], **more}


@pytest.mark.parametrize(
    ("options", "is_loosened"),
    [
        ([{"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/b"}]}], True),
        ([option("a"), option("b")], True),
        ([option("a"), option("a")], False),
        ([option("a", required=[]), option("b")], False),
        ([option("a"), {**option("b"), "type": ["object", "null"]}], False),
        ([option("a"), {"type": "string"}], False),
    ],
)
def test_options_that_a_property_tells_apart_may_stand_in_one_of(
    options: list[Any], is_loosened: bool
) -> None:
    schema = {
        "oneOf": options,
        "discriminator": {"propertyName": "kind"},
        "$defs": {"a": option("a"), "b": option("b")},
    }
    assert ("anyOf" in read_schema(schema).schema) == is_loosened


KEYWORDS = sorted({*CHECKS, *SUBSCHEMAS, *UNSUPPORTED, SECRET})
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.just(SECRET),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), ANYTHING, max_size=3))
def test_any_schema_is_read_or_refused_without_its_words(schema: dict[str, Any]) -> None:
    try:
        read = read_schema(schema)
    except SchemaRefused as refusal:
        assert SECRET not in f"{refusal.place} {refusal.message}"  # noqa: PT017 - most are refused
    else:
        assert read.parts[""] == read.schema
