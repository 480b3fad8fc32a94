"""The load and latency of each deployment at each step of a rollout, in words for the picture's caption.

Pure. A deployment answers more slowly under more load, so two latencies are comparable only where the loads are
alike. Next: `curves.py` has the same series over time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tuneship.gates.metrics.series import ArmTraffic, RolloutSeries
from tuneship.gates.reports.curves import mean_percentile
from tuneship.gates.reports.split_history import Change
from tuneship.gates.reports.tables import Table


@dataclass(frozen=True)
class ArmLoad:
    """Load and latency of one deployment at one step."""

    per_second: float
    # `mean_percentile` of the step's buckets.
    p95_ms: float | None


@dataclass(frozen=True)
class StepLoad:
    """Load of both deployments while the candidate had this share of the traffic."""

    share: int
    baseline: ArmLoad
    candidate: ArmLoad


def loads_by_step(
    history: Sequence[Change], series: RolloutSeries | None, candidate_id: str
) -> list[StepLoad]:
    """The loads for each split during which at least one bucket was finished."""
    known = [change for change in history if change.at is not None]
    if series is None or series.horizon is None or not known:
        return []
    ends = [*(change.at for change in known[1:]), series.horizon]
    loads: list[StepLoad] = []
    for change, end in zip(known, ends, strict=True):
        if change.at is None or end is None or end <= change.at:
            continue
        # A bucket across a change of the split counts for the step in which it ends.
        buckets = [bucket for bucket in series.buckets if change.at < bucket.end <= end]
        seconds = (end - change.at).total_seconds()
        step = StepLoad(
            change.weights.get(candidate_id, 0),
            _load([bucket.baseline for bucket in buckets], seconds),
            _load([bucket.candidate for bucket in buckets], seconds),
        )
        loads.append(step)
    return loads


def explained(loads: Sequence[StepLoad]) -> str:
    """Explain the latency picture in one or two sentences; empty if there is nothing to compare."""
    both = [step for step in loads if None not in (step.baseline.p95_ms, step.candidate.p95_ms)]
    if not both:
        return ""
    alike = min(both, key=_unlikeness)
    candidate, baseline = alike.candidate, alike.baseline
    text = (
        "A deployment answers more slowly the more it has to do, so compare the two only where their loads are alike:"
        f" at {alike.share} % the candidate answered {candidate.per_second:.1f} requests/s with a p95 of"
        f" {candidate.p95_ms:.0f} ms, the baseline {baseline.per_second:.1f} with {baseline.p95_ms:.0f} ms."
    )
    alone = [step for step in loads if step.share == 100 and step.candidate.p95_ms is not None]
    if alone:
        text += (
            f" At 100 % the candidate has all the load, {alone[-1].candidate.per_second:.1f} requests/s, and its p95 of"
            f" {alone[-1].candidate.p95_ms:.0f} ms has no baseline beside it."
        )
    return text


def load_table(loads: Sequence[StepLoad]) -> Table:
    """The candidate's share at each step, then requests per second and p95 of the candidate, then of the baseline."""
    rows = [
        [f"{step.share} %", *_cells(step.candidate), *_cells(step.baseline)]
        for step in loads
        if step.baseline.per_second or step.candidate.per_second
    ]
    arms = (f"{arm}: {what}" for arm in ("candidate", "baseline") for what in ("requests/s", "p95"))
    return Table(("candidate's share", *arms), rows)


def _load(traffic: Sequence[ArmTraffic], seconds: float) -> ArmLoad:
    requests = sum(arm.requests for arm in traffic)
    return ArmLoad(requests / seconds, mean_percentile(traffic, 1))


def _unlikeness(step: StepLoad) -> float:
    few, many = sorted((step.baseline.per_second, step.candidate.per_second))
    return 1.0 - few / many if many else 1.0


def _cells(load: ArmLoad) -> list[str]:
    return [
        f"{load.per_second:.1f}" if load.per_second else "-",
        "-" if load.p95_ms is None else f"{load.p95_ms:.0f} ms",
    ]
