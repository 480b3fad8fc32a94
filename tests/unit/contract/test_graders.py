"""Graders on the wire: OpenAI's spelling, defaults, and refusals with a place and without the text."""

from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from tuneship.contract.common import CreateRequest
from tuneship.contract.graders import (
    Grader,
    GraderName,
    Graders,
    gating_names,
    grader_parts,
    metadata_field,
)
from tuneship.service.answers.field_errors import error_from_pydantic

SECRET = "Mrs Smith"


class Graded(CreateRequest):
    """A body with graders, as an evaluation has them."""

    graders: Graders


def read(*graders: dict[str, Any]) -> list[Grader]:
    return Graded.model_validate({"graders": list(graders)}).graders


def string_check(name: GraderName = "a", **fields: Any) -> dict[str, Any]:
    return {"name": name, "type": "string_check", **fields}


def similar(metric: str, **fields: Any) -> dict[str, Any]:
    return {"name": "b", "type": "text_similarity", "evaluation_metric": metric, **fields}


def test_a_grader_of_openai_is_read_as_it_is() -> None:
    sent = {
        "type": "text_similarity",
        "name": "overlap",
        "input": "{{sample.output_text}}",
        "reference": "{{item.reference}}",
        "pass_threshold": 0.8,
        "evaluation_metric": "fuzzy_match",
    }
    (found,) = read(sent)
    assert found.model_dump() == sent
    assert read(string_check(operation="ilike"))[0].model_dump(exclude_unset=True) == string_check(
        operation="ilike"
    )


def test_input_and_reference_are_the_answer_and_the_reference() -> None:
    (found,) = read(string_check())
    assert found.model_dump() == {
        **string_check(),
        "operation": "eq",
        "normalize": "space",
        "input": "{{sample.output_text}}",
        "reference": "{{item.reference}}",
    }


def test_a_grader_that_was_read_can_be_read_again() -> None:
    graders = read(string_check(), {"name": "j", "type": "json", "schema": {"type": "object"}})
    assert Graded.model_validate({"graders": graders}).graders == graders
    written = Graded(graders=graders).model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert written["graders"][1] == {"name": "j", "type": "json", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("grader", "place", "code"),
    [
        ({"name": "b", "type": "label_model"}, "type", "unsupported_value"),
        ({"name": "b", "type": "score_model", "range": [0, 1]}, "type", "unsupported_value"),
        ({"name": "b", "type": "multi"}, "type", "unsupported_value"),
        ({"name": "b", "type": "python", "source": SECRET}, "type", "unsupported_value"),
        ({"name": "b", "type": SECRET}, "type", "invalid_value"),
        ({"name": "b", "type": [SECRET]}, "type", "invalid_value"),
        ({"name": "b"}, "type", "missing_field"),
        ({"name": SECRET, "type": "number"}, "name", "invalid_value"),
        ({"name": "a", "type": "number"}, "name", "invalid_value"),
        *(
            (similar(metric), "evaluation_metric", "unsupported_value")
            for metric in ("bleu", "gleu", "meteor", "cosine", "rouge_1", "rouge_5")
        ),
        (similar(SECRET), "evaluation_metric", "invalid_value"),
        ({"name": "b", "type": "text_similarity"}, "evaluation_metric", "missing_field"),
        (similar("chrf", pass_threshold=1.1), "pass_threshold", "out_of_range"),
        (string_check("b", operation=SECRET), "operation", "invalid_value"),
        (string_check("b", normalize=SECRET), "normalize", "invalid_value"),
        (string_check("b", input="{{" + SECRET + "}}"), "input", "invalid_value"),
        (string_check("b", reference="{{item.reference"), "reference", "invalid_value"),
        (string_check("b", reference=""), "reference", "out_of_range"),
        ({"name": "b", "type": "regex"}, "pattern", "missing_field"),
        ({"name": "b", "type": "regex", "pattern": "x" * 1001}, "pattern", "out_of_range"),
        ({"name": "b", "type": "number", "tolerance": -1.0}, "tolerance", "out_of_range"),
        ({"name": "b", "type": "number", "relative": 1.1}, "relative", "out_of_range"),
        ({"name": "b", "type": "number", "tolerance": float("nan")}, "tolerance", "invalid_value"),
        ({"name": "b", "type": "json", "schema": []}, "schema", "wrong_type"),
        ({"name": "b", "type": "json", "fields": []}, "fields", "out_of_range"),
        ({"name": "b", "type": "json", "pass_threshold": 0.5}, "pass_threshold", "conflict"),
        ({"name": "b", "type": "tool_calls", "input": "x"}, "input", "unknown_field"),
        ({"name": "b", "type": "loss", "pass_threshold": 0.5}, "pass_threshold", "unknown_field"),
        ({"name": "b", "type": "choice", "choices": [SECRET]}, "choices", "unknown_field"),
    ],
)
def test_a_grader_is_refused_with_its_place_and_never_the_text(
    grader: dict[str, Any], place: str, code: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        read(string_check(), grader)
    found = error_from_pydantic(refused.value)
    assert found.param == f"graders[1].{place}"
    assert found.details[0].code == code
    assert SECRET not in str(found.as_json(None))
    if code == "unsupported_value":
        assert grader.get("evaluation_metric", grader["type"]) in found.message


@pytest.mark.parametrize("graders", [[], [string_check(f"g{n}") for n in range(9)]])
def test_there_are_one_to_eight_graders(graders: list[dict[str, Any]]) -> None:
    with pytest.raises(ValidationError) as refused:
        read(*graders)
    assert error_from_pydantic(refused.value).param == "graders"


@pytest.mark.parametrize("grader", [5, "string_check", None])
def test_a_grader_that_is_no_object_is_refused(grader: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        read(string_check(), grader)
    assert error_from_pydantic(refused.value).param == "graders[1]"


# Graders that decide.

SIMILAR = {"name": "s", "type": "text_similarity", "evaluation_metric": "rouge_l"}
FIELDS = {"name": "f", "type": "json", "fields": ["a"]}


def test_the_first_grader_decides_unless_others_are_named() -> None:
    graders = read(
        string_check("a"), {**SIMILAR, "pass_threshold": 0.5}, {**FIELDS, "pass_threshold": 1.0}
    )
    assert gating_names(graders, None) == ("a",)
    assert gating_names(graders, ["f", "s"]) == ("f", "s")


@pytest.mark.parametrize(
    ("gating", "below"),
    [
        ([], ""),
        (["a", "a"], ""),
        (["a", "b", "c", "d", "e"], ""),
        (["a", "missing"], "[1]"),
        (["s"], "[0]"),
        (["a", "f"], "[1]"),
    ],
)
def test_names_that_cannot_decide_are_refused(gating: list[str], below: str) -> None:
    others = [string_check(name) for name in "abcde"]
    with pytest.raises(PydanticCustomError) as refused:
        gating_names(read(*others, SIMILAR, FIELDS), gating)
    assert refused.value.context == {"below": below}


def test_a_choice_decides_and_a_loss_does_not() -> None:
    graders = read({"name": "c", "type": "choice"}, {"name": "l", "type": "loss"})
    assert gating_names(graders, None) == ("c",)
    for wanted in (["l"], ["c", "l"]):
        with pytest.raises(PydanticCustomError, match="loss") as refused:
            gating_names(graders, wanted)
        assert refused.value.context == {"below": f"[{len(wanted) - 1}]"}
    with pytest.raises(PydanticCustomError, match="loss"):
        gating_names(graders[1:], None)


def test_a_share_does_not_decide_even_by_default() -> None:
    with pytest.raises(PydanticCustomError):
        gating_names(read(SIMILAR, string_check()), None)


# Templates.


def test_a_template_has_texts_and_names() -> None:
    parts = grader_parts("a {{ item.reference }}{{item.metadata.x-1}} } b")
    assert parts == [("a ", "item.reference"), ("", "item.metadata.x-1"), (" } b", None)]
    assert metadata_field("item.metadata.x-1") == "x-1"
    assert metadata_field("item.reference") is None


@pytest.mark.parametrize(
    "template",
    [
        "{{",
        "{{}}",
        "{{item}}",
        "{{item.metadata.}}",
        "{{item.metadata.a b}}",
        "{{sample.output_json}}",
        "{{ item.reference | upper }}",
        "{{ {{item.reference}} }}",
    ],
)
def test_a_template_knows_no_other_name(template: str) -> None:
    with pytest.raises(ValueError):
        grader_parts(template)
