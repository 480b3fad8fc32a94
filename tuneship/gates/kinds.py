"""The gates of a rollout, one object each: where the plan has its limits, and who counts its bad requests.

A gate that nothing counts cannot be built: it would be proven by the absence of evidence. A new gate is a field of the
plan (`plan.py`) and an entry in `GATES`. Next: `readings.py` weighs the counts.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tuneship.contract.generation import Generation
from tuneship.contract.metrics import MetricSeries
from tuneship.gates.gate_types import Gate, LatencyLimits, Source
from tuneship.gates.latency import has_latency, number_above
from tuneship.gates.metrics.series import ArmTraffic, Bucket, Unusable
from tuneship.gates.plan import (
    CallerGates,
    CanaryRules,
    LatencyGates,
    QualityGates,
)
from tuneship.gates.statistics.cells import cell_of
from tuneship.gates.statistics.evidence import BucketCounts, Limits
from tuneship.gates.statistics.gate_limits import GateLimits, TypicalGate

# An answer that repeats the same four words more often than this is caught in a loop.
REPEATED_TOO_OFTEN = 5
# These faults are gross where they happen: a small part of alpha finds them, and delays the other
# gates by little.
GROSS_ALPHA = 0.25


@dataclass(frozen=True, slots=True)
class Measured:
    """One bucket with the limits that were known before it began: when an answer counts as slow, short or long."""

    bucket: Bucket
    edges: tuple[tuple[float, ...] | None, tuple[float, ...] | None]
    limits: LatencyLimits | None = None
    # Output tokens that are too few and too many.
    lengths: tuple[float, float] | None = None
    # Cells by which the candidate may be slower because it writes longer answers.
    allowed: float = 0.0
    # Where a server publishes estimates only, what rounds them.
    dither: float = 0.5
    # Whether the candidate carries no more than a replica of the baseline did.
    is_equal_load: bool = True


@dataclass(frozen=True)
class GateKind:
    """One gate. It has `count`, `is_bad` or both; the service's own counts are preferred."""

    name: str
    # The reason of a rollout that this gate rolls back.
    reason: str
    limits: Callable[[CanaryRules], GateLimits | TypicalGate | None]
    # Bad requests of both deployments in a bucket, from the service's metrics. Raises `Unusable`.
    count: Callable[[Measured, Limits], BucketCounts] | None = None
    # Whether a deployment's metrics hold what `count` needs.
    is_published: Callable[[MetricSeries | None], bool] = lambda _: True
    # Whether an answer that the traffic driver received is bad.
    is_bad: Callable[[Generation], bool] | None = None
    # This gate's part of alpha, in proportion to those of the others.
    alpha_share: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError where neither the service nor the driver counts for this gate."""
        if self.count is None and self.is_bad is None:
            raise ValueError(f"nothing counts the bad requests of the gate {self.name!r}")

    def choose(self, plan: CanaryRules, baseline_metrics: MetricSeries | None) -> Gate:
        """Fix the gate's source and state for a rollout, given a metrics answer from before its start."""
        # The service sees every caller's requests, the driver only its own.
        published = self.count is not None and self.is_published(baseline_metrics)
        source: Source = "series" if published else "probes"
        limits = self.limits(plan)
        if limits is None:
            return Gate(self.name, self.reason, source, "disabled")
        if not published and (plan.traffic is None or self.is_bad is None):
            return Gate(self.name, self.reason, source, "not_available")
        state = "active" if limits.limits() else "not_evaluated"
        return Gate(self.name, self.reason, source, state)


def is_repetitive(text: str) -> bool:
    """Whether the same four words come again and again."""
    words = text.split()
    grams = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
    return bool(grams) and max(grams.values()) > REPEATED_TOO_OFTEN


def _is_no_json(answer: Generation) -> bool:
    try:
        json.loads(answer.completion)
    except ValueError:
        return True
    return False


def _errors(measured: Measured, _: Limits) -> BucketCounts:
    b = measured.bucket
    return BucketCounts(
        b.candidate.requests, b.candidate.errors, b.baseline.requests, b.baseline.errors
    )


def _slow(
    measured: Measured,
    limits: Limits,
    *,
    limit: Literal["typical_ms", "slow_ms", "very_slow_ms"],
) -> BucketCounts:
    b, known = measured.bucket, measured.limits
    for traffic in (b.baseline, b.candidate):
        if traffic.served > 0 and not has_latency(traffic):
            raise Unusable("answers without their latency")
        # Limits per token say nothing about whole answers.
        if known and known.per_token and traffic.served > 0 and traffic.cells_per_token is None:
            raise Unusable("answers without their time per token")
    # Before there are limits nothing is slow, and nothing is proven either.
    if known is None:
        return BucketCounts(0, 0)
    place = cell_of(getattr(known, limit))

    def above(traffic: ArmTraffic, edges: tuple[float, ...] | None, cells: float) -> int:
        if not traffic.served:
            return 0
        return number_above(
            traffic, edges, place + cells, per_token=known.per_token, dither=measured.dither
        )

    x_c = above(b.candidate, measured.edges[1], measured.allowed)
    w_c = v_c = 0
    if limits.farther:
        w_c, v_c = (
            above(b.candidate, measured.edges[1], measured.allowed + cells)
            for cells in limits.farther
        )
    x_b = above(b.baseline, measured.edges[0], 0.0)
    return BucketCounts(b.candidate.served, x_c, b.baseline.served, x_b, w_c, v_c)


def _other_length(measured: Measured, _: Limits, *, is_short: bool) -> BucketCounts:
    b, lengths = measured.bucket, measured.lengths
    if lengths is None:
        return BucketCounts(0, 0)

    def of(traffic: ArmTraffic) -> tuple[int, int]:
        if traffic.token_cells is None:
            if traffic.answered > 0:
                raise Unusable("answers without their lengths")
            return 0, 0
        total = traffic.token_cells.total
        if not is_short:
            return total, traffic.token_cells.above(math.ceil(cell_of(lengths[1]) - 1e-6))
        # Blank answers are counted by a gate of their own.
        blank = min(traffic.empty or 0, total)
        short = total - traffic.token_cells.above(math.floor(cell_of(lengths[0]) + 1e-6))
        return total - blank, max(short - blank, 0)

    return BucketCounts(*of(b.candidate), *of(b.baseline))


def _lost(measured: Measured, _: Limits, *, name: Literal["cancelled", "refused"]) -> BucketCounts:
    """Requests that ended in this way without an answer, out of these and the counted requests."""

    def of(traffic: ArmTraffic) -> tuple[int, int]:
        lost: int | None = getattr(traffic, name)
        # An unknown count beside requests must not read as "nobody gave up".
        if lost is None:
            if traffic.requests > 0:
                raise Unusable(f"the counts of {name} requests are gone")
            return 0, 0
        return traffic.requests + lost, lost

    return BucketCounts(*of(measured.bucket.candidate), *of(measured.bucket.baseline))


def _publishes(metrics: MetricSeries | None, metric: str, counts: str) -> bool:
    return getattr(getattr(metrics, metric, None), counts, None) is not None


def _blank(measured: Measured, _: Limits) -> BucketCounts:
    def of(traffic: ArmTraffic) -> tuple[int, int]:
        if traffic.answered > 0 and traffic.empty is None:
            raise Unusable("the counts of empty answers are gone")
        if (traffic.empty or 0) > traffic.answered:
            raise Unusable("more empty answers than answers")
        return traffic.answered, traffic.empty or 0

    return BucketCounts(*of(measured.bucket.candidate), *of(measured.bucket.baseline))


def _latency(name: str) -> Callable[[CanaryRules], GateLimits | TypicalGate | None]:
    return lambda plan: getattr(
        plan.latency_gates or LatencyGates(slow=None, very_slow=None, typical=None), name
    )


def _callers(name: str) -> Callable[[CanaryRules], GateLimits | TypicalGate | None]:
    return lambda plan: getattr(
        plan.caller_gates or CallerGates(abandoned=None, refused=None), name
    )


def _quality(name: str) -> Callable[[CanaryRules], GateLimits | TypicalGate | None]:
    return lambda plan: getattr(
        plan.quality_gates or QualityGates(empty=None, short=None, long=None), name
    )


# Every gate by its name, in the order in which a look reports them.
GATES: Mapping[str, GateKind] = {
    kind.name: kind
    for kind in (
        GateKind("error", "error_rate", lambda plan: plan.error_gate, _errors),
        GateKind("slow", "latency", _latency("slow"), partial(_slow, limit="slow_ms")),
        GateKind(
            "very_slow", "latency", _latency("very_slow"), partial(_slow, limit="very_slow_ms")
        ),
        GateKind(
            "typical",
            "latency",
            _latency("typical"),
            partial(_slow, limit="typical_ms"),
            partial(_publishes, metric="latency", counts="cells"),
            alpha_share=GROSS_ALPHA,
        ),
        GateKind(
            "empty",
            "quality",
            _quality("empty"),
            _blank,
            partial(_publishes, metric="token_usage", counts="empty_count"),
            is_bad=lambda answer: not answer.completion.strip(),
        ),
        *(
            GateKind(
                name,
                "quality",
                _quality(name),
                partial(_other_length, is_short=name == "short"),
                partial(_publishes, metric="token_usage", counts="cells"),
                alpha_share=GROSS_ALPHA,
            )
            for name in ("short", "long")
        ),
        GateKind(
            "length",
            "quality",
            _quality("length"),
            is_bad=lambda answer: answer.finish_reason == "length",
        ),
        GateKind(
            "repetition",
            "quality",
            _quality("repetition"),
            is_bad=lambda answer: is_repetitive(answer.completion),
        ),
        GateKind(
            "invalid_json",
            "quality",
            _quality("invalid_json"),
            is_bad=_is_no_json,
        ),
        GateKind(
            "abandoned",
            "abandoned_requests",
            _callers("abandoned"),
            partial(_lost, name="cancelled"),
            partial(_publishes, metric="error_rate", counts="cancelled_count"),
            alpha_share=GROSS_ALPHA,
        ),
        GateKind(
            "refused",
            "refused_requests",
            _callers("refused"),
            partial(_lost, name="refused"),
            partial(_publishes, metric="error_rate", counts="refused_count"),
            alpha_share=GROSS_ALPHA,
        ),
    )
}

# What the traffic driver counts, by gate.
BAD_ANSWERS: Mapping[str, Callable[[Generation], bool]] = {
    name: kind.is_bad for name, kind in GATES.items() if kind.is_bad is not None
}
