"""Whole cards for tests, with a text of choice in every place that people, models and services can write."""

from datetime import UTC, datetime
from typing import Any

from tuneship.cards.making import new_card
from tuneship.contract.evaluations import Score, SliceReport
from tuneship.contract.model_card import (
    CardDataset,
    CardDecisions,
    CardEvaluation,
    CardGate,
    CardGrader,
    CardModel,
    CardQuestion,
    CardReading,
    CardRollout,
    CardTraining,
    ModelCard,
    SplitChange,
    Statements,
)

NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)
CHOICES = {"output_type": "classification", "decision_role": "informs"}
EVERY_STATEMENT = dict.fromkeys(Statements.model_fields, "stated") | CHOICES


def evaluation(text: str = "site", verdict: str = "no_harm_shown") -> CardEvaluation:
    pair: dict[str, Any] = {"wins": 58, "losses": 62, "ties": 872}
    pair |= {"difference": -0.004, "low": -0.022, "high": 0.014}
    score = Score(score=0.593, low=0.562, high=0.623)
    grader = CardGrader(
        name=text, type="string_check", candidate=score, baseline=score, verdict="pass", **pair
    )
    part = SliceReport.model_validate(
        {"field": text, "value": text, "grader": text, "examples": 410, "verdict": verdict} | pair
    )
    return CardEvaluation(
        evaluation_id=text, dataset_id=text, sentence=text, graders=[grader], slices=[part]
    )


def statements(text: str) -> Statements:
    return Statements.model_validate(dict.fromkeys(EVERY_STATEMENT, text) | CHOICES)


def card(text: str = "harmless") -> ModelCard:
    """A card of a promoted release with this text wherever a text can be."""
    return new_card(
        NOON,
        CardModel(
            id=text,
            name=text,
            base_model=text,
            base_source=text,
            base_licence=text,
            base_sha256={text: text},
        ),
        statements(text),
        evaluation(text),
        versions={text: text},
        data=[CardDataset(role="training", id=text, sha256=text, parents=[text])],
        training=CardTraining(
            job_id=text,
            status=text,
            method=text,
            hyperparameters={text: text},
            steps=400,
            devices=[text],
            instance_type=text,
        ),
        rollout=CardRollout(
            endpoint_id=text,
            candidate_deployment_id=text,
            changes=[SplitChange(weights={text: 100}, why=text)],
            gates=[CardReading(name=text, state=text)],
            requests={text: 3},
        ),
        decisions=CardDecisions(
            run_key=text,
            outcome=text,
            reason=text,
            gate=text,
            gates=[CardGate(name=text, state=text, value=0.5, limit=0.3, note=text)],
            questions=[CardQuestion(about=[text], decision=text, approver=text, comment=text)],
            notes=[text],
        ),
    )
