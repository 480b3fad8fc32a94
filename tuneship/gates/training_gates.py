"""Decides whether a fine-tuning job may be deployed: gates T0-T11 over its record and its metrics (§2.1).

Pure; a missing value is never read as 0. `judge_training` once the job has ended, `watch_training` at every poll while
it runs, `judge_smoke` over answers of the deployed model at 0 % traffic. Reject beats hold beats pass.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Literal

from pydantic import Field

from tuneship.contract.common import StrictModel
from tuneship.gates.frames import MetricCurve, UnreadableMetrics, read_curve
from tuneship.gates.kinds import is_repetitive

Decision = Literal["pass", "reject", "hold"]
State = Literal["pass", "reject", "hold", "warn", "note", "not_available", "disabled"]

SMOOTHING_STEPS = 10
# Consecutive polls before a running job is cancelled, since one may catch a batch of bad luck.
LIVE_BROKEN_POLLS, LIVE_DIVERGING_POLLS = 2, 3
# A smaller rise, as a share of the first loss, is noise.
MIN_RISE_SHARE = 0.1
# Hardly any text can be predicted so well that was not seen before.
LEAK_LOSS = 0.01
MAX_TIME_PER_TOKEN_RATIO = 3.0
# Below this share of answers with an end, the cause is a fault rather than too short a training.
MIN_ENDS_LEARNT = 0.5
# Fewer prompts that both answered do not show which one is slower.
MIN_TIMED_PROMPTS = 5


class TrainingRules(StrictModel):
    """Limits of the training gates."""

    min_gain: float = Field(
        default=0.02, ge=0, lt=1, description="Validation loss must fall by this share."
    )
    champion_margin: float = Field(
        default=0.02, ge=0, description="Nats that the loss may exceed the champion's."
    )
    max_validation_loss: float | None = Field(
        default=None, gt=0, description="For a first model, which has no champion; null: off."
    )
    min_validation_examples: int = Field(
        default=50, ge=1, description="Fewer cannot decide anything."
    )
    best_checkpoint_served: bool = Field(
        default=True,
        description="The service makes the best checkpoint the model, so a later rise only warns.",
    )


@dataclass(frozen=True)
class GateResult:
    """The result of one gate: its state, its value beside its limit, and a note."""

    name: str
    state: State
    value: float | None = None
    limit: float | None = None
    note: str = ""


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

    @property
    def best(self) -> float:
        return min(self.losses)


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
    first_gates = [_terminal(job, curve), _finite(curve)]
    if any(gate.state == "reject" for gate in first_gates):
        return _verdict(first_gates)
    points = curve.evaluations()
    losses = points.values("validation_loss")
    evidence = Evidence(job, rules, champion, curve, points, losses)
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
    if job.status != "completed" or not job.fine_tuned_model:
        return GateResult(name, "reject", note=f"job is {job.status}, or names no fine-tuned model")
    if curve is None:
        return GateResult(name, "pass")
    if not job.total_steps:
        return GateResult(name, "hold", note="total steps are not known")
    # A server may report every nth step only, so the last ones may be missing.
    share = curve.last_step / job.total_steps
    return GateResult(name, "pass" if share >= 0.95 else "reject", share, 0.95)


def _finite(curve: MetricCurve) -> GateResult:
    name = "T1 finite"
    losses = curve.values("training_loss")
    if not losses or not all(map(math.isfinite, losses)):
        return GateResult(name, "reject", note="training loss is missing or not finite")
    if any(map(math.isinf, curve.values("validation_loss"))):
        return GateResult(name, "reject", note="validation loss is not finite")
    # Fewer measurements cannot distinguish a falling loss from one that has turned.
    points = len(curve.evaluations())
    return GateResult(name, "pass" if points >= 3 else "reject", points, 3, "validation points")


def _settled(evidence: Evidence) -> GateResult:
    """T2 cancels a running job; for an ended one it is only reported, because its best checkpoint is used."""
    state = "note" if _is_diverging(evidence.curve, 0) else "pass"
    return GateResult("T2 divergence", state)


def _learned(evidence: Evidence) -> GateResult:
    """Also covers "no gain at all": any useful `min_gain` is above 0.1 %."""
    first = evidence.losses[0]
    limit = (1.0 - max(evidence.rules.min_gain, 0.001)) * first
    state = "pass" if evidence.best <= limit else "reject"
    return GateResult("T3 learned", state, evidence.best, limit, f"first {first:.4f}")


def _against_champion(evidence: Evidence) -> GateResult:
    name, champion = "T4 champion", evidence.champion
    if champion is None:
        return GateResult(name, "not_available", evidence.best, note="no champion")
    # Losses are in nats per token of one tokenizer over one set of examples: of other base models or
    # data they say nothing about which model is better. The same file may be uploaded twice.
    job, ids = evidence.job, (evidence.job.validation_dataset_id, champion.validation_dataset_id)
    same_content = job.content_sha256 is not None and job.content_sha256 == champion.content_sha256
    is_comparable = (
        job.base_model == champion.base_model
        and None not in ids
        and (ids[0] == ids[1] or same_content)
    )
    if champion.best_validation_loss is None or not is_comparable:
        return GateResult(name, "hold", evidence.best, note="not comparable with the champion")
    limit = champion.best_validation_loss + evidence.rules.champion_margin
    state = "pass" if evidence.best <= limit else "reject"
    return GateResult(
        name, state, evidence.best, limit, f"champion {champion.best_validation_loss:.4f}"
    )


def _overfit(evidence: Evidence) -> GateResult:
    name = "T5 overfit"
    # Overfitting is a validation loss that rises while the training loss falls. If both rise, the
    # training diverges, which is another gate's matter.
    train = evidence.points.values("training_loss")[-3:]
    ratio = evidence.losses[-1] / evidence.best if evidence.best > 0 else math.inf
    falls = train[-1] < train[0]
    if ratio > 1.05 and falls:
        state = "warn" if evidence.rules.best_checkpoint_served else "reject"
        return GateResult(name, state, ratio, 1.05, "last over best; the best checkpoint serves")
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
            name, "hold", evidence.best, LEAK_LOSS, "so low that data may have leaked"
        )
    if evidence.job.duplicates:
        return GateResult(
            name, "hold", evidence.job.duplicates, 0, "validation examples trained on"
        )
    accuracy = [a for a in evidence.points.values("accuracy") if not math.isnan(a)]
    if not all(0.0 <= a <= 1.0 for a in accuracy):
        return GateResult(name, "hold", note="accuracy outside 0..1")
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
    return GateResult(name, "pass" if worst < 0.05 else "hold", worst, 0.05, "ln perplexity - loss")


def _enough_data(evidence: Evidence) -> GateResult:
    examples, least = evidence.job.validation_examples, evidence.rules.min_validation_examples
    if examples is None:
        return GateResult("T8 enough data", "hold", None, least, "validation examples unknown")
    return GateResult("T8 enough data", "pass" if examples >= least else "hold", examples, least)


def _first_model(evidence: Evidence) -> GateResult:
    name, limit = "T9 first model", evidence.rules.max_validation_loss
    if evidence.champion is not None:
        return GateResult(name, "not_available", note="there is a champion")
    if limit is None:
        return GateResult(name, "disabled", evidence.best, note="no max_validation_loss given")
    return GateResult(name, "pass" if evidence.best <= limit else "reject", evidence.best, limit)


def _ends(evidence: Evidence) -> GateResult:
    """A model that has not learnt where an answer ends goes on until `max_tokens`, whatever its loss is."""
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


@dataclass(frozen=True)
class DivergenceWatch:
    """State carried from poll to poll of a running job."""

    broken_polls: int = 0
    diverging_polls: int = 0
    step: int = 0


def lowest_loss(losses: Sequence[float | None]) -> float | None:
    """The lowest validation loss of a job; None where it was never measured."""
    finite = [one for one in losses if one is not None and math.isfinite(one)]
    return min(finite, default=None)


def watch_training(
    watch: DivergenceWatch, metrics: Mapping[str, Any], warmup_steps: int
) -> tuple[DivergenceWatch, GateResult | None]:
    """One poll: the next `Watch`, and a rejecting gate when the job should be cancelled.

    A poll without a new step is no new evidence of divergence.
    """
    try:
        curve = read_curve(metrics)
        is_broken = not all(map(math.isfinite, curve.values("training_loss")))
    except UnreadableMetrics:
        return _broken(watch)
    if is_broken:
        return _broken(watch)
    step = curve.last_step
    # Readable losses end a row of broken polls; without a new step nothing is known about divergence.
    if step <= watch.step:
        return DivergenceWatch(0, watch.diverging_polls, watch.step), None
    polls = watch.diverging_polls + 1 if _is_diverging(curve, warmup_steps) else 0
    after = DivergenceWatch(0, polls, step)
    if polls < LIVE_DIVERGING_POLLS:
        return after, None
    return after, GateResult(
        "T2 divergence", "reject", polls, LIVE_DIVERGING_POLLS, "polls running"
    )


def _broken(watch: DivergenceWatch) -> tuple[DivergenceWatch, GateResult | None]:
    after = DivergenceWatch(watch.broken_polls + 1, watch.diverging_polls, watch.step)
    if after.broken_polls < LIVE_BROKEN_POLLS:
        return after, None
    limit = LIVE_BROKEN_POLLS
    return after, GateResult("T1 finite", "reject", after.broken_polls, limit, "polls running")


def _is_diverging(curve: MetricCurve, warmup_steps: int) -> bool:
    """Whether the smoothed loss is above twice its minimum so far, or above 1.5 x the first loss after the warm-up.

    Near the end of a good run the minimum is so small that the noise of single batches doubles it (seen: 0.07 to 0.16
    from a first loss of 6): a rise of less than a tenth of the first loss is no divergence.
    """
    later = curve.after_step(warmup_steps)
    if not len(later):
        return False
    smoothed = curve.smoothed_training_loss(SMOOTHING_STEPS)
    first = later.values("training_loss")[0]
    lowest = min(smoothed)
    has_risen = smoothed[-1] > 2.0 * lowest and smoothed[-1] - lowest > MIN_RISE_SHARE * first
    return has_risen or smoothed[-1] > 1.5 * first


@dataclass(frozen=True)
class SmokeAnswer:
    """One answer of a deployment to a fixed prompt, after the client's usual retries."""

    status: int
    completion: str = ""
    finish_reason: str | None = None
    output_tokens: int = 0
    latency_ms: float = 0.0

    @property
    def problem(self) -> str | None:
        """Why this is no sensible answer; None for one that is."""
        if self.status != 200:
            return f"status {self.status}"
        if not self.completion.strip():
            return "empty completion"
        if self.finish_reason not in ("stop", "length"):
            return "unknown finish_reason"
        return "repeats itself" if is_repetitive(self.completion) else None

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per token; None where there was no token, or the answer does not say how many."""
        is_known = self.status == 200 and self.output_tokens > 0
        return self.latency_ms / self.output_tokens if is_known else None


def judge_smoke(baseline: Sequence[SmokeAnswer], candidate: Sequence[SmokeAnswer]) -> GateResult:
    """T10: the candidate answers the fixed prompts sensibly and not far slower per token than the baseline.

    Both answered the same prompts in this order. Slow is who takes more than three times as long on most prompts: the
    slowest of ten would be a machine's stall. With ten prompts, of which a stall may spoil each one with probability
    0.1, a healthy candidate is refused once in 6,800 releases; slow tails are for the canary, which sees enough.
    """
    name = "T10 smoke"
    if not candidate:
        return GateResult(name, "hold", note="no answers")
    for number, answer in enumerate(candidate, start=1):
        if problem := answer.problem:
            return GateResult(name, "reject", note=f"prompt {number}: {problem}")
    pairs = zip(candidate, baseline, strict=False)
    times = [(ours.ms_per_token, theirs.ms_per_token) for ours, theirs in pairs]
    ratios = [ours / theirs for ours, theirs in times if ours and theirs]
    if len(ratios) < MIN_TIMED_PROMPTS:
        return GateResult(name, "pass", note="time per output token not known")
    slower = median_low(ratios)
    return GateResult(
        name,
        "pass" if slower <= MAX_TIME_PER_TOKEN_RATIO else "reject",
        slower,
        MAX_TIME_PER_TOKEN_RATIO,
        "times the baseline's time per output token, median",
    )
