"""A card counts what it states, and the mapping in the docs is the one that it counts by."""

import re
from pathlib import Path

import pytest

from tests.unit.cards.cards import EVERY_STATEMENT, card, evaluation
from tuneship.cards.making import completeness_of
from tuneship.cards.mapping import ATTRIBUTES, FIELDS
from tuneship.cards.rendering import as_markdown
from tuneship.contract.evaluations import ExampleCounts
from tuneship.contract.model_card import CardEvaluation, Completeness, ExactMatches, Statements

PAGE = Path(__file__).parents[3] / "docs" / "model-card.md"


def stated(**given: str) -> Statements:
    return Statements.model_validate(given)


def missing(found: Completeness) -> list[str]:
    return [one.number for one in found.missing]


def test_a_card_that_states_nothing_misses_all_31_attributes_in_nine_groups() -> None:
    found = completeness_of(Statements(), None)
    assert (found.stated, found.attributes) == (0, 31)
    assert missing(found) == list(ATTRIBUTES)
    groups = [number.split()[0] for number in ATTRIBUTES]
    assert [groups.count(str(group)) for group in range(1, 10)] == [4, 4, 2, 4, 2, 4, 5, 4, 2]


def test_statements_and_a_graded_slice_state_all() -> None:
    found = completeness_of(Statements.model_validate(EVERY_STATEMENT), evaluation())
    assert (found.stated, found.missing) == (31, [])


def test_an_attribute_of_two_fields_needs_both() -> None:
    [first, *_] = completeness_of(stated(developer="Ann"), None).missing
    assert (first.number, first.fields) == ("1 i", ["contact"])
    assert "1 i" not in missing(completeness_of(stated(developer="Ann", contact="a@b"), None))


@pytest.mark.parametrize("name", EVERY_STATEMENT)
def test_each_statement_that_an_attribute_asks_for_counts(name: str) -> None:
    without = {one: said for one, said in EVERY_STATEMENT.items() if one != name}
    found = completeness_of(Statements.model_validate(without), evaluation())
    [field] = [one for one in FIELDS if one.name == name]
    assert [(one.number, one.fields) for one in found.missing] == [
        (number, [name]) for number in field.attributes
    ]


def test_a_slice_that_was_not_tested_says_nothing_about_fairness() -> None:
    found = completeness_of(
        Statements.model_validate(EVERY_STATEMENT), evaluation(verdict="not_tested")
    )
    assert missing(found) == ["7 ii", "8 iv"]


def test_exact_matches_are_a_validity_without_graders() -> None:
    matches = ExactMatches(rows=200, before=1, after=80)
    found = completeness_of(Statements(), CardEvaluation(exact_matches=matches))
    assert {"7 i", "8 ii"}.isdisjoint(missing(found))


@pytest.mark.parametrize("change", ["loss", "no candidate", "nothing scored", "no rows"])
def test_a_loss_or_a_score_of_nothing_is_no_validity_and_is_not_published(change: str) -> None:
    found = evaluation()
    if change == "loss":
        found.graders[0].measure = "loss"
    elif change == "no candidate":
        found.graders[0].candidate = None
    elif change == "nothing scored":
        found.examples = ExampleCounts(selected=5, failed=5)
        found.exact_matches = ExactMatches(rows=5, before=0, after=0)
    else:
        found.graders, found.exact_matches = [], ExactMatches(rows=0, before=0, after=0)
    made = card().model_copy(update={"evaluation": found})
    assert "model-index" not in as_markdown(made)
    assert {"7 i", "8 ii"} <= set(missing(completeness_of(made.statements, found)))


def test_every_statement_stands_in_the_mapping_once() -> None:
    named = [one.name for one in FIELDS if one.is_statement]
    assert sorted(named) == sorted(Statements.model_fields)
    assert {number for one in FIELDS for number in one.attributes} == set(ATTRIBUTES)


def test_the_page_shows_the_mapping() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(one.name, one.chai, ", ".join(one.attributes) or "-") for one in FIELDS]
