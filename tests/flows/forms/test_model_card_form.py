"""Statements for the model card are refused by the name of their field, and their text is in no error."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.forms.release_form import ReleaseParameters
from flows.script.main import load_parameters
from flows.shared.errors import BadInput
from tuneship.contract.model_card import LONGEST_STATEMENT

PLANTED = "Qplanted0123456789"


def parameters(**model_card: Any) -> dict[str, Any]:
    about = {"model_name": "m", "model": "ft:tuneship-tiny:m:x", "endpoint": {"name": "shop"}}
    return about | {"model_card": model_card}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"users": PLANTED * LONGEST_STATEMENT},
        "model_card.users: must have at most 4000 characters",
    ),
    ({"users": " \n"}, "model_card.users: must not be blank: leave it out"),
    ({"users": {"of": PLANTED}}, "model_card.users: should be a valid string"),
    ({"user": PLANTED}, "model_card.user: is not a known key (did you mean users?)"),
    (
        {"decision_role": PLANTED},
        "model_card.decision_role: should be 'informs', 'augments' or 'replaces'",
    ),
    (
        {"users": PLANTED, "required": ["users", "contact", "funding"]},
        "model_card: required, and not stated: contact, funding",
    ),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_a_statement_is_refused_by_its_place_and_never_quoted(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    file = tmp_path / "release.json"
    file.write_text(json.dumps(parameters(**given)))
    with pytest.raises(BadInput) as refused:
        load_parameters(file, ReleaseParameters)
    assert str(refused.value).splitlines()[1:] == [f"  {said}"]
    # Prefect shows pydantic's own text.
    with pytest.raises(ValidationError) as shown:
        ReleaseParameters.model_validate(parameters(**given))
    assert PLANTED not in str(shown.value)


def test_a_required_statement_that_does_not_exist_is_named_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "release.json"
    file.write_text(json.dumps(parameters(required=["users", PLANTED], users="coders")))
    with pytest.raises(BadInput) as refused:
        load_parameters(file, ReleaseParameters)
    _, problem = str(refused.value).splitlines()
    assert problem.strip().startswith(
        "model_card.required.1: must be the name of a statement: developer,"
    )
    assert PLANTED not in problem


def test_statements_make_no_other_release() -> None:
    plain = ReleaseParameters.model_validate(parameters())
    stated = ReleaseParameters.model_validate(parameters(users="coders"))
    assert plain.digest() == stated.digest()
    assert stated.model_card.statements.users == "coders"
