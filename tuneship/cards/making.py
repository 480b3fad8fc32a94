"""Makes a card: counts the source attributes of HTI-1 that it states, and names the others."""

from datetime import datetime
from typing import Any

from tuneship.cards.mapping import ATTRIBUTES, FIELDS
from tuneship.contract.model_card import (
    CardEvaluation,
    CardGrader,
    CardModel,
    Completeness,
    ExactMatches,
    MissingAttribute,
    ModelCard,
    Statements,
)

STATED_BY_PEOPLE = tuple(Statements.model_fields)


def validity_of(evaluation: CardEvaluation) -> tuple[list[CardGrader], ExactMatches | None]:
    """The graders that scored answers of the new model, and its exact matches; nothing where no example was scored."""
    if evaluation.examples is not None and not evaluation.examples.scored:
        return [], None
    # A loss is no share of right answers.
    graders = [one for one in evaluation.graders if one.candidate and one.measure == "score"]
    matches = evaluation.exact_matches
    return graders, matches if matches and matches.rows else None


def completeness_of(statements: Statements, evaluation: CardEvaluation | None) -> Completeness:
    """Count the attributes of which every field is stated."""
    measured = evaluation or CardEvaluation()
    found = {
        "evaluation": any(validity_of(measured)),
        # A slice that was too small says nothing about fairness.
        "evaluation.slices": any(one.verdict != "not_tested" for one in measured.slices),
    } | {name: getattr(statements, name) is not None for name in STATED_BY_PEOPLE}
    missing: list[MissingAttribute] = []
    for number, what in ATTRIBUTES.items():
        fields = [one.name for one in FIELDS if number in one.attributes and not found[one.name]]
        if fields:
            missing.append(MissingAttribute(number=number, what=what, fields=fields))
    stated = len(ATTRIBUTES) - len(missing)
    return Completeness(stated=stated, attributes=len(ATTRIBUTES), missing=missing)


def new_card(
    made_at: datetime,
    model: CardModel,
    statements: Statements | None = None,
    evaluation: CardEvaluation | None = None,
    **sections: Any,
) -> ModelCard:
    """A card with these sections, and how complete it is."""
    stated = statements or Statements()
    return ModelCard(
        made_at=made_at,
        completeness=completeness_of(stated, evaluation),
        model=model,
        statements=stated,
        evaluation=evaluation,
        **sections,
    )


def with_release(card: ModelCard, release: ModelCard) -> ModelCard:
    """The card of a model's release, with the origin of the model as this card knows it."""
    return release.model_copy(
        update={
            "made_at": card.made_at,
            "model": card.model,
            "data": card.data,
            "training": card.training,
            "privacy": card.privacy,
        }
    )
