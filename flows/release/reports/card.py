"""Writes the model card of a release beside its report, whatever the outcome: `model_card.json` and `model_card.md`.

Facts that the service no longer knows, or cannot say now, are left out. Next: `tuneship/cards/`.
"""

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from flows.forms.release_form import ReleaseParameters
from flows.release.result import EvaluationFindings, ReleaseResult
from flows.shared.private_files import make_private
from tuneship.cards.canonical import canonical, card_sha256
from tuneship.cards.making import new_card
from tuneship.cards.rendering import as_markdown
from tuneship.client import TuneshipError
from tuneship.client.card_facts import CardOrigin, origin_of
from tuneship.contract.model_card import (
    CardDecisions,
    CardEvaluation,
    CardGate,
    CardGrader,
    CardLatency,
    CardModel,
    CardQuestion,
    CardReading,
    CardRollout,
    ExactMatches,
    ModelCard,
    SplitChange,
)
from tuneship.contract.models import job_of_model
from tuneship.host.durable import write_private
from tuneship.prefect.connection import api

CARD_FILE = "model_card.json"
# A service that does not answer must not hold up the end of a release, nor the clean-up of a stopped one.
FACTS_WITHIN_S = 10.0


def write_card(result: ReleaseResult, release: ReleaseParameters, folder: Path) -> tuple[Path, str]:
    """Write both files, readable by their owner only. Returns the one with JSON, and its SHA-256. Raises OSError."""
    card = card_of(result, release)
    make_private(folder)
    file = folder / CARD_FILE
    write_private(file, canonical(card))
    write_private(file.with_suffix(".md"), as_markdown(card))
    return file, card_sha256(card)


def card_of(result: ReleaseResult, release: ReleaseParameters) -> ModelCard:
    """The card of a release that has ended, or that was stopped."""
    origin = _origin(result, release)
    return new_card(
        datetime.now(UTC),
        origin.model,
        release.model_card.statements,
        _evaluation(result, release),
        versions={"tuneship": version("tuneship-client")},
        data=origin.data,
        training=origin.training,
        rollout=_rollout(result, release),
        privacy=origin.privacy,
        decisions=_decisions(result),
    )


def _origin(result: ReleaseResult, release: ReleaseParameters) -> CardOrigin:
    job_id = result.job_id or job_of_model(result.model or "")
    name, base_model = release.model_name, release.base_model
    try:
        return origin_of(api(FACTS_WITHIN_S), name, base_model, result.model, job_id)
    except TuneshipError:
        return CardOrigin(CardModel(id=result.model, name=name, base_model=base_model))


def _evaluation(result: ReleaseResult, release: ReleaseParameters) -> CardEvaluation | None:
    found, accuracy = result.evaluation, result.accuracy
    if found is not None:
        return _graded(found, release)
    if accuracy is None or not accuracy.rows:
        return None
    matches = ExactMatches(rows=accuracy.rows, before=accuracy.before, after=accuracy.after)
    return CardEvaluation(exact_matches=matches)


def _graded(found: EvaluationFindings, release: ReleaseParameters) -> CardEvaluation:
    types = {one.name: one.type for one in release.evaluation.graders}
    return CardEvaluation(
        **found.model_dump(exclude={"graders", "slices", "lost_lines", "record"}),
        margin=release.evaluation.margin,
        min_slice=release.evaluation.min_slice,
        graders=[CardGrader(**one.model_dump(), type=types.get(one.name)) for one in found.graders],
        slices=found.slices,
    )


def _rollout(result: ReleaseResult, release: ReleaseParameters) -> CardRollout | None:
    if not result.history and not result.decisions:
        return None
    compared = result.comparisons
    last = compared[-1] if compared else {}
    limits = next((look["limits"] for look in reversed(compared) if look.get("limits")), None)
    fields = set(CardReading.model_fields)
    return CardRollout(
        rollout_id=result.rollout_id,
        endpoint_id=result.endpoint_id,
        baseline_deployment_id=result.baseline_deployment_id,
        candidate_deployment_id=result.candidate_deployment_id,
        formula_version=last.get("formula_version"),
        looks=len(result.decisions),
        changes=[
            SplitChange(at=one.at, weights=one.weights, why=one.why) for one in result.history
        ],
        gates=[
            CardReading(name=name, **{one: gate[one] for one in gate if one in fields - {"name"}})
            for name, gate in last.get("gates", {}).items()
        ],
        latency=CardLatency(**limits) if limits else None,
        requests=result.driver or {},
        lease_seconds=release.canary.lease_seconds,
    )


def _decisions(result: ReleaseResult) -> CardDecisions:
    questions = [*result.questions]
    if result.approval is not None:
        asked = CardQuestion(about=[], **result.approval, at=result.approval_asked_at)
        questions.append(asked)
    return CardDecisions(
        run_key=result.run_key,
        outcome=result.outcome,
        reason=result.reason,
        gate=result.gate,
        gates=[CardGate(**gate) for gate in result.training_gates],
        questions=questions,
        notes=result.notes,
    )
