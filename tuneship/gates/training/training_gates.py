"""Decides whether a fine-tuning job may be deployed: gates T0-T9 and T11 over its record and its metrics (§2.1).

Pure; a missing value is never read as 0. `judge_training` once the job has ended. Reject beats hold beats pass. Where
the service publishes losses by row, T3, T4 and T9 compare two models on the same rows, and know how much their
difference may be chance. Next: `divergence.py` watches a running job, `smoke_test.py` is T10.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final, Literal

from pydantic import Field

from tuneship.contract.common import StrictModel
from tuneship.contract.reports.job_reports import RowLosses
from tuneship.gates.gate_result import GateResult
from tuneship.gates.training.divergence import is_diverging
from tuneship.gates.training.frames import MetricCurve, UnreadableMetrics, read_curve
from tuneship.gates.training.row_losses import (
    MIN_ROWS,
    SMALLEST_ERROR,
    Z_1,
    Z_5,
    Paired,
    judged,
    read_row_losses,
)

Decision = Literal["pass", "reject", "hold"]
# It grows when the same job and metrics may give another verdict or number.
RULE_VERSION: Final = "1"

# Fewer measurements cannot tell a loss that falls from one that has turned.
MIN_POINTS = 3
# A step whose loss is not finite may have been skipped, but not many, and none at the end.
MAX_BROKEN_SHARE, CLEAN_END = 0.01, 0.1
# Without losses by row nobody knows the noise, so the loss must fall by so many times more.
GAIN_WITHOUT_ROWS = 4.0
# The margin to the champion, as a share of its loss: at least and at most.
MARGIN_SHARE, MOST_MARGIN_SHARE = 0.015, 0.075
# Hardly any text can be predicted so well that was not seen before.
LEAK_LOSS = 0.01
# Fewer duplicates than this share of the rows are left out, and change nothing.
MAX_DUPLICATES = 0.01
# Below this share of answers with an end, the cause is a fault rather than too short a training.
MIN_ENDS_LEARNT = 0.5
NO_ROWS = "the server publishes no losses by row, so chance is not known"
FEW_ROWS = f"fewer than {MIN_ROWS} rows judge both models, so chance is not known"


class TrainingRules(StrictModel):
    """Limits of the training gates."""

    min_gain: float = Field(
        default=0.005,
        ge=0,
        lt=1,
        description="Validation loss must fall by this share beyond chance; by four times as much where the server "
        "publishes no losses by row.",
    )
    champion_margin: float = Field(
        default=0.02,
        ge=0,
        description="Nats by which the loss may exceed that of the baseline, the model that serves now. At least "
        "1.5 % of its loss and at most 7.5 %, where the server publishes losses by row.",
    )
    max_validation_loss: float | None = Field(
        default=None,
        gt=0,
        description="For a first model, while no tuned model serves at the endpoint; null: the base model's own loss.",
    )
    min_validation_examples: int = Field(
        default=50, ge=1, description="Fewer cannot decide anything."
    )
    best_checkpoint_served: bool = Field(
        default=True,
        description="The service makes the best checkpoint the model, so a later rise only warns.",
    )

    def margin(self, champion_loss: float) -> float:
        """Nats that the loss may exceed a champion's with this loss."""
        usual = max(self.champion_margin, MARGIN_SHARE * champion_loss)
        return min(usual, MOST_MARGIN_SHARE * champion_loss)


@dataclass(frozen=True)
class TrainingVerdict:
    """The decision over all gates; `reason` is the name of the gate that decided, or "none"."""

    decision: Decision
    reason: str
    gates: tuple[GateResult, ...]


@dataclass(frozen=True)
class ValidationMeasure:
    """A model's validation loss and the data it was measured on; equal content makes two losses comparable."""

    base_model: str
    validation_dataset_id: str | None
    # Content digest in the tags of the validation dataset.
    content_sha256: str | None
    # None where it could not be read.
    best_validation_loss: float | None
    model: str | None = None


@dataclass(frozen=True)
class FinishedJob:
    """The fields of a job that the gates need, and the flow's knowledge of its data. None: unknown."""

    status: str
    fine_tuned_model: str | None
    base_model: str
    total_steps: int | None
    validation_dataset_id: str | None
    content_sha256: str | None
    validation_examples: int | None
    # Number of examples in both the training and the validation file.
    duplicates: int | None = None
    # Share of validation examples behind whose answers the end of the turn was the likeliest token.
    ends_learnt: float | None = None


@dataclass(frozen=True)
class Evidence:
    """The inputs of gates T3 to T9 and T11. `best` and `first` are validation losses."""

    job: FinishedJob
    rules: TrainingRules
    champion: ValidationMeasure | None
    curve: MetricCurve
    points: MetricCurve
    losses: list[float]
    # None where the server publishes none.
    rows: RowLosses | None

    @property
    def best(self) -> float:
        return min(self.losses)

    @property
    def gain(self) -> Paired | None:
        """Paired row losses: the base model against the served checkpoint."""
        return judged(self.rows, self.rows.start, self.rows.served) if self.rows else None

    @property
    def without_rows(self) -> str:
        return FEW_ROWS if self.rows else NO_ROWS


def judge_training(
    job: FinishedJob,
    metrics: Mapping[str, Any],
    champion: ValidationMeasure | None,
    rules: TrainingRules,
) -> TrainingVerdict:
    """Apply all gates to an ended job. `champion` None: no tuned model serves at the endpoint yet."""
    try:
        curve = read_curve(metrics)
    except UnreadableMetrics as error:
        return _verdict([_terminal(job, None), GateResult("T1 finite", "reject", note=str(error))])
    rows, points = read_row_losses(metrics), curve.evaluations()
    is_broken = rows is not None and None in rows.served
    first_gates = [_terminal(job, curve), _finite(curve, is_broken), _points(points)]
    if any(gate.state == "reject" for gate in first_gates):
        return _verdict(first_gates)
    losses = points.values("validation_loss")
    evidence = Evidence(job, rules, champion, curve, points, losses, rows)
    return _verdict([*first_gates, *(gate(evidence) for gate in GATES)])


def _verdict(gates: Sequence[GateResult]) -> TrainingVerdict:
    decisions: tuple[Decision, ...] = ("reject", "hold")
    for decision in decisions:
        for gate in gates:
            if gate.state == decision:
                return TrainingVerdict(decision, gate.name, tuple(gates))
    return TrainingVerdict("pass", "none", tuple(gates))


def _terminal(job: FinishedJob, curve: MetricCurve | None) -> GateResult:
    name = "T0 terminal"
    if job.status != "completed":
        return GateResult(name, "reject", note=f"the job is {job.status}, not completed")
    if not job.fine_tuned_model:
        return GateResult(name, "reject", note="the job has made no model")
    if curve is None:
        return GateResult(name, "pass")
    if not job.total_steps:
        return GateResult(
            name, "hold", note="the server does not say how many steps the training has"
        )
    # A server may report every nth step only, so the last ones may be missing.
    gaps = [after - before for before, after in pairwise([0, *curve.frame.index])]
    interval = int(median(gaps)) if gaps else 0
    least = job.total_steps - max(interval, int(0.05 * job.total_steps))
    state = "pass" if curve.last_step >= least else "reject"
    note = f"the losses are reported up to this step of {job.total_steps}"
    return GateResult(name, state, curve.last_step, least, note)


def _finite(curve: MetricCurve, is_served_broken: bool) -> GateResult:
    name = "T1 finite"
    losses = curve.values("training_loss")
    if not losses or not any(map(math.isfinite, losses)):
        return GateResult(
            name, "reject", note="no step has a training loss that is a finite number"
        )
    if is_served_broken:
        return GateResult(name, "reject", note="the model's loss of a validation row is not finite")
    pairs = zip(losses, curve.values("validation_loss"), strict=True)
    # A step without an evaluation has no validation loss.
    broken = [not math.isfinite(loss) or math.isinf(measured) for loss, measured in pairs]
    share, note = sum(broken) / len(broken), "share of the steps whose loss is not finite"
    is_end_broken = any(broken[-math.ceil(CLEAN_END * len(broken)) :])
    if is_end_broken:
        note += "; one is among the last tenth, where none may be"
    is_sound = share <= MAX_BROKEN_SHARE and not is_end_broken
    state = ("note" if share else "pass") if is_sound else "reject"
    return GateResult(name, state, share, MAX_BROKEN_SHARE, note)


def _points(points: MetricCurve) -> GateResult:
    name, count = "T1 points", len(points)
    if not count:
        return GateResult(name, "reject", note="the validation loss was never measured")
    state = "pass" if count >= MIN_POINTS else "note" if count == MIN_POINTS - 1 else "hold"
    note = "measurements of the validation loss; equal ones in a row count once"
    if state != "pass":
        note += "; so few cannot show whether it still falls: measure more often (`validation_frequency`)"
    return GateResult(name, state, count, MIN_POINTS, note)


def _settled(evidence: Evidence) -> GateResult:
    """T2 cancels a running job; for an ended one it is only reported, because its best checkpoint is used."""
    name = "T2 divergence"
    if is_diverging(evidence.curve.values("training_loss")):
        return GateResult(name, "note", note="the training loss had risen at the end")
    return GateResult(name, "pass", note="the training loss had not risen at the end")


def _learned(evidence: Evidence) -> GateResult:
    name, gain, rules = "T3 learned", evidence.gain, evidence.rules
    if gain is not None:
        return _beats(name, gain, rules.min_gain, "better than at the start")
    first, losses, without_rows = evidence.losses[0], evidence.losses, evidence.without_rows
    if len(losses) == 1:
        return GateResult(name, "not_available", first, note=f"one measurement; {without_rows}")
    # The lowest of many measurements is low by luck; a mean of several in a row much less.
    count = math.ceil(len(losses) / 3)
    thirds = (losses[start : start + count] for start in range(len(losses) - count + 1))
    lowest = min(sum(third) / count for third in thirds)
    limit = (1.0 - max(GAIN_WITHOUT_ROWS * rules.min_gain, 0.001)) * first
    state = "pass" if lowest <= limit else "reject"
    return GateResult(name, state, lowest, limit, f"first {first:.4g}; {without_rows}")


def _beats(name: str, gain: Paired, share: float, note: str) -> GateResult:
    """Whether the loss is lower by more than a share of the first, with one chance in a hundred to err."""
    highest, limit = gain.theirs + Z_1 * gain.error, (1.0 - share) * gain.ours
    state = "pass" if highest < limit else "reject"
    return GateResult(name, state, highest, limit, f"{note}: {gain}")


def _against_champion(evidence: Evidence) -> GateResult:
    name, champion, rows = "T4 champion", evidence.champion, evidence.rows
    if champion is None:
        return GateResult(
            name, "not_available", evidence.best, note="no tuned model serves there yet"
        )
    if rows is not None and rows.compared and rows.compared_model == champion.model:
        worse = judged(rows, rows.served, rows.compared)
        if worse is not None:
            return _not_worse(name, evidence.rules, worse, len(rows.rows))
    # Losses are in nats per token of one tokenizer over one set of examples: of other base models or
    # data they say nothing about which model is better. The same file may be uploaded twice.
    job, ids = evidence.job, (evidence.job.validation_dataset_id, champion.validation_dataset_id)
    same_content = job.content_sha256 is not None and job.content_sha256 == champion.content_sha256
    is_comparable = (
        job.base_model == champion.base_model
        and None not in ids
        and (ids[0] == ids[1] or same_content)
    )
    best = champion.best_validation_loss
    if best is None or not math.isfinite(best) or not is_comparable:
        return GateResult(name, "hold", evidence.best, note="not comparable with the baseline")
    limit = best + evidence.rules.champion_margin
    state = "pass" if evidence.best <= limit else "reject"
    note = f"baseline {best:.4g}; {evidence.without_rows}"
    return GateResult(name, state, evidence.best, limit, note)


def _not_worse(name: str, rules: TrainingRules, worse: Paired, rows: int) -> GateResult:
    """Reject a model that is worse beyond the margin and beyond chance; pass one that is certainly not far beyond
    it.
    """
    champion, loss = worse.theirs, worse.ours
    margin = rules.margin(champion)
    limit, note = champion + margin, f"worse than the baseline's {champion:.4f} by {worse}"
    if worse.mean > margin and worse.mean - Z_1 * worse.error > 0:
        return GateResult(name, "reject", loss, limit, note)
    if worse.mean + Z_5 * worse.error <= 2 * margin:
        return GateResult(name, "pass", loss, limit, note)
    # The error at which it would pass if it is as bad as it looks, or be rejected.
    wanted = (2 * margin - worse.mean) / Z_5
    if worse.mean > margin:
        wanted = max(wanted, worse.mean / Z_1)
    # Only a part of the validation rows judges.
    if wanted > SMALLEST_ERROR:
        enough = math.ceil(worse.needs(wanted) * rows / worse.rows)
        note += f"; about {enough:,} validation rows would decide"
    return GateResult(name, "hold", loss, limit, note)


def _overfit(evidence: Evidence) -> GateResult:
    name = "T5 overfit"
    train = evidence.points.values("training_loss")[-3:]
    ratio = evidence.losses[-1] / evidence.best if evidence.best > 0 else math.inf
    if ratio > 1.05 and not evidence.rules.best_checkpoint_served:
        return GateResult(name, "reject", ratio, 1.05, "last over best; the last checkpoint serves")
    # Overfitting is a validation loss that rises while the training loss falls. If both rise, the
    # training diverges, which is another gate's matter.
    if ratio > 1.05 and train[-1] < train[0]:
        return GateResult(name, "warn", ratio, 1.05, "last over best; the best checkpoint serves")
    gap = (evidence.losses[-1] - train[-1]) / train[-1] if train[-1] > 0 else math.inf
    if ratio > 1.02 or gap > 0.5:
        return GateResult(name, "warn", ratio, 1.05, f"gap to the training loss {gap:.2f}")
    return GateResult(name, "pass", ratio, 1.05)


def _plateau(evidence: Evidence) -> GateResult:
    # Only a note: more epochs may help a loss that still falls, and never harm a decision made now.
    recent = evidence.losses[-max(2, math.ceil(0.3 * len(evidence.losses))) :]
    gain = 1.0 - recent[-1] / recent[0] if recent[0] > 0 else 0.0
    return GateResult("T6 plateau", "pass" if gain >= 0.005 else "note", gain, 0.005)


def _sane(evidence: Evidence) -> GateResult:
    name = "T7 sanity"
    if evidence.best < LEAK_LOSS:
        return GateResult(
            name,
            "hold",
            evidence.best,
            LEAK_LOSS,
            "so low that the answers may have been trained on",
        )
    rows, job = evidence.rows, evidence.job
    duplicates = (sum(rows.trained_on) if rows else job.duplicates) or 0
    examples = (len(rows.rows) if rows else job.validation_examples) or 1
    if duplicates >= MAX_DUPLICATES * examples and duplicates:
        limit, note = MAX_DUPLICATES * examples, f"of {examples} validation rows were trained on"
        return GateResult(name, "hold", duplicates, limit, note)
    accuracy = [a for a in evidence.points.values("accuracy") if not math.isnan(a)]
    if not all(0.0 <= a <= 1.0 for a in accuracy):
        return GateResult(name, "hold", note="an accuracy is not between 0 and 1")
    perplexity = evidence.points.values("perplexity")
    pairs = zip(perplexity, evidence.losses, strict=True)
    # Two numbers that the service derives from each other: if they disagree, neither can be trusted.
    # The loss is cut at 700 because the exponential of more does not fit into a float.
    off = [
        abs(math.log(p) - min(loss, 700.0)) if 0.0 < p < math.inf else math.inf
        for p, loss in pairs
        if not math.isnan(p)
    ]
    worst = max(off, default=0.0)
    if worst < 0.05 and duplicates:
        note = f"{duplicates} of {examples} validation rows were trained on"
        note += "; the gates by row leave them out" if rows else ", which is too few to matter"
        return GateResult(name, "note", note=note)
    note = "largest difference between a loss and the logarithm of its perplexity"
    return GateResult(name, "pass" if worst < 0.05 else "hold", worst, 0.05, note)


def _enough_data(evidence: Evidence) -> GateResult:
    name, examples = "T8 enough data", evidence.job.validation_examples
    least = evidence.rules.min_validation_examples
    if examples is None:
        return GateResult(name, "hold", None, least, "the number of validation rows is not known")
    return GateResult(
        name, "pass" if examples >= least else "hold", examples, least, "validation rows"
    )


def _first_model(evidence: Evidence) -> GateResult:
    name, limit = "T9 first model", evidence.rules.max_validation_loss
    if evidence.champion is not None:
        return GateResult(name, "not_available", note="a tuned model serves there already")
    if limit is not None:
        state = "pass" if evidence.best <= limit else "reject"
        return GateResult(name, state, evidence.best, limit)
    if evidence.gain is None:
        return GateResult(name, "not_available", evidence.best, note=evidence.without_rows)
    return _beats(name, evidence.gain, 0.0, "better than the base model")


def _ends(evidence: Evidence) -> GateResult:
    """Check that the model has learnt to end its answers; otherwise it goes on until `max_tokens`, whatever its
    loss.
    """
    name, share = "T11 ends learnt", evidence.job.ends_learnt
    if share is None:
        return GateResult(name, "not_available", note="not measured")
    state = "pass" if share >= MIN_ENDS_LEARNT else "hold"
    return GateResult(
        name, state, share, MIN_ENDS_LEARNT, "of the answers end in the likeliest token"
    )


GATES: tuple[Callable[[Evidence], GateResult], ...] = (
    _settled,
    _learned,
    _against_champion,
    _overfit,
    _plateau,
    _sane,
    _enough_data,
    _first_model,
    _ends,
)


def lowest_loss(losses: Sequence[float | None]) -> float | None:
    """The lowest validation loss of a job; None where it was never measured."""
    finite = [one for one in losses if one is not None and math.isfinite(one)]
    return min(finite, default=None)
