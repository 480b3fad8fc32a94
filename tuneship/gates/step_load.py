"""The load and latency of each deployment at each step of a rollout: the words under the picture.

A deployment answers more slowly under more load, so two latencies are comparable only where the loads are alike.
Next: `flows/release/plots.py` draws the same series.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flows.rollout.result import Change
from tuneship.gates.series import ArmTraffic, RolloutSeries


@dataclass(frozen=True)
class ArmLoad:
    """Load and latency of one deployment at one step."""

    per_second: float
    # Mean of the buckets' percentiles, weighted by requests; None without requests. The percentile of the whole step
    # cannot be known: the metrics have no single times.
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
    """The loads of each split during which a bucket was finished."""
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
    """Explain the picture of the latency in a sentence or two; empty where there is nothing to compare."""
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


def rows(loads: Sequence[StepLoad]) -> list[list[str]]:
    """The cells of a table: share, then requests per second and p95 of the candidate, then of the baseline."""
    return [
        [f"{step.share} %", *_cells(step.candidate), *_cells(step.baseline)]
        for step in loads
        if step.baseline.per_second or step.candidate.per_second
    ]


def _load(traffic: Sequence[ArmTraffic], seconds: float) -> ArmLoad:
    requests = sum(arm.requests for arm in traffic)
    timed = [(arm.requests, arm.quantiles_ms[1]) for arm in traffic if arm.quantiles_ms]
    weight = sum(count for count, _ in timed)
    p95 = sum(count * value for count, value in timed) / weight if weight else None
    return ArmLoad(requests / seconds, p95)


def _unlikeness(step: StepLoad) -> float:
    few, many = sorted((step.baseline.per_second, step.candidate.per_second))
    return 1.0 - few / many if many else 1.0


def _cells(load: ArmLoad) -> list[str]:
    return [
        f"{load.per_second:.1f}" if load.per_second else "-",
        "-" if load.p95_ms is None else f"{load.p95_ms:.0f} ms",
    ]
