"""The model card of an export shows the gates of a release as its result file has them."""

from typing import Any

import pytest

from tuneship.conversion.order import ExportOrder, ExportReport
from tuneship.service.models.model_card import CardFacts, card, release_gates

RESULT: dict[str, Any] = {
    "gates": [{"name": "error", "state": "active"}],  # as the rollout began
    "training_gates": [
        {"name": "T5 overfit", "state": "pass", "value": 1.01, "limit": 1.05, "note": ""},
        {"name": "T4 champion", "state": "not_available", "value": None, "limit": None, "note": ""},
    ],
    "decisions": [
        {"phase": "compare", "gates": {"error": {"state": "undecided", "candidate_share": 0.5}}},
        {"phase": "bake", "gates": {"error": {"state": "proven", "candidate_share": 0.003}}},
        {"phase": "settle", "gates": {"error": {"state": "undecided", "candidate_share": 0.9}}},
    ],
}


def card_with(result: dict[str, Any]) -> str:
    facts = CardFacts("ft:b:notes:x", "notes", "today", "b", gates=release_gates(result))
    return card(facts, ExportOrder("b", "a", "t", "peft"), ExportReport())


def test_the_card_has_the_training_gates_and_the_last_comparison_with_their_numbers() -> None:
    shown = card_with(RESULT)
    assert "| T5 overfit | pass | value 1.01, limit 1.05 |" in shown
    assert "| T4 champion | not_available |  |" in shown
    assert "| error | proven | candidate_share 0.003 |" in shown
    assert "active" not in shown


def test_a_release_that_compared_nothing_has_its_training_gates_only() -> None:
    assert "| error |" not in card_with(RESULT | {"decisions": []})


@pytest.mark.parametrize("other", [{}, {"decisions": 3, "training_gates": []}, []])
def test_a_file_without_results_is_refused(other: Any) -> None:
    with pytest.raises((KeyError, TypeError, AttributeError)):
        release_gates(other)
