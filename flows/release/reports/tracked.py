"""The part of a release's result that is tracked: outcome, gates, numbers, what serves now."""

import math
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from flows.forms.release_form import Tracking
from flows.release.result import ReleaseResult
from flows.rollout.tracked import last_shares, last_states
from flows.shared.errors import BadInput
from flows.shared.tracking import track
from tuneship.contract.models import job_of_model
from tuneship.settings import TrackingSettings, faults_in
from tuneship.tracking.targets import targets_of
from tuneship.tracking.tracked_run import TrackedRelease


def chosen_trackers(choice: Tracking) -> TrackingSettings:
    """The settings by which a release is tracked. Raises `BadInput` for a setting of the environment that is wrong."""
    try:
        settings = choice.settings
        targets_of(settings)
    except ValidationError as error:
        raise BadInput(f"tracking: a setting is not valid: {faults_in(error)}") from None
    except ValueError as error:
        raise BadInput(f"tracking: TUNESHIP_MLFLOW_URL {error}") from None
    return settings


def track_release(settings: TrackingSettings, result: ReleaseResult) -> None:
    """Write the release into the trackers of its settings, and note in its result what became of that."""
    job_id = result.job_id or job_of_model(result.model or "")
    serving = {"promoted": result.model, "rolled_back": result.champion_model}
    states = {gate["name"]: str(gate["state"]) for gate in result.training_gates}
    release = TrackedRelease(
        run_key=result.run_key,
        outcome=result.outcome,
        reason=result.reason,
        gates=states | last_states(result),
        measures=dict(measures(result)),
        serving=serving.get(result.outcome),
        report=Path(result.report).parent if result.report else None,
    )
    others = [one.job_id for one in result.contenders if one.job_id != job_id]
    result.tracking = track(settings, job_id, release, others)


def measures(result: ReleaseResult) -> Iterator[tuple[str, float]]:
    """Numbers by name, such as `gate/T4 champion/value`; those that are not finite are left out."""
    for gate in result.training_gates:
        for what in ("value", "limit"):
            if gate.get(what) is not None and math.isfinite(gate[what]):
                yield f"gate/{gate['name']}/{what}", float(gate[what])
    yield from last_shares(result)
    if result.accuracy is not None and result.accuracy.rows:
        yield "exact_match/before", result.accuracy.before / result.accuracy.rows
        yield "exact_match/after", result.accuracy.after / result.accuracy.rows
    for one in result.evaluation.graders if result.evaluation else ():
        scores = {
            one.measure: one.candidate.score if one.candidate else None,
            "difference": one.difference,
            "low": one.low,
            "high": one.high,
            "wins": one.wins,
            "losses": one.losses,
        }
        for measure, value in scores.items():
            if value is not None:
                yield f"evaluation/{one.name}/{measure}", float(value)
