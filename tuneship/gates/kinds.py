"""The gates of a rollout, one object each: where the plan has its limits, and who counts its bad requests.

A gate that nothing counts cannot be built: it would be proven by the absence of evidence. A new gate is a field of the
plan (`plan.py`) and an entry in `GATES`. Next: `readings.py` weighs the counts.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Literal

from tuneship.contract.generation import Generation
from tuneship.contract.metrics import MetricSeries
from tuneship.gates.evidence import BucketCounts
from tuneship.gates.gate_limits import GateLimits
from tuneship.gates.gate_types import Gate, LatencyLimits, Source
from tuneship.gates.latency import has_latency, slow_requests
from tuneship.gates.plan import (
    CallerGates,
    CanaryRules,
    LatencyGates,
    QualityGates,
)
from tuneship.gates.series import Arm, ArmTraffic, Bucket, RolloutSeries, Unusable

# An answer that repeats the same four words more often than this is caught in a loop.
REPEATED_TOO_OFTEN = 5
# These faults are gross where they happen: a small part of alpha finds them, and delays the other
# gates by nothing.
CALLERS_ALPHA = 0.25


@dataclass(frozen=True)
class Published:
    """The published counts of a rollout's buckets, and how slow an answer may be."""

    series: RolloutSeries
    buckets: Sequence[Bucket]
    limits: LatencyLimits | None
    # Factor on the candidate's latency limits, at least 1.
    scale: float
    # Requests that are still being answered and have been for too long, by bucket, the newest first.
    hanging: Mapping[Arm, Sequence[int]] = field(default_factory=dict[Arm, Sequence[int]])


@dataclass(frozen=True)
class GateKind:
    """One gate. At least one of `count` and `is_bad` is given; the service's own counts are preferred."""

    name: str
    # The reason of a rollout that this gate rolls back.
    reason: str
    limits: Callable[[CanaryRules], GateLimits | None]
    # Bad requests of both deployments, bucket by bucket, from the service's metrics. Raises `Unusable`.
    count: Callable[[Published], list[BucketCounts]] | None = None
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


def _errors(measured: Published) -> list[BucketCounts]:
    return [
        BucketCounts(
            b.candidate.requests, b.candidate.errors, b.baseline.requests, b.baseline.errors
        )
        for b in measured.buckets
    ]


def _slow(measured: Published, *, limit: Literal["slow_ms", "very_slow_ms"]) -> list[BucketCounts]:
    buckets, limits = measured.buckets, measured.limits
    for bucket in buckets:
        for traffic in (bucket.baseline, bucket.candidate):
            if traffic.served > 0 and not has_latency(traffic):
                raise Unusable("answers without their latency")
    # Before the limits are frozen nothing is slow, and nothing is proven either.
    if limits is None:
        return [BucketCounts(0, 0) for _ in buckets]
    limit_ms: float = getattr(limits, limit)
    candidate = slow_requests(measured.series, buckets, "candidate", limit_ms * measured.scale)
    baseline = slow_requests(measured.series, buckets, "baseline", limit_ms)
    counts = [
        BucketCounts(b.candidate.served, x_c, b.baseline.served, x_b)
        for b, x_c, x_b in zip(buckets, candidate, baseline, strict=True)
    ]

    # Requests that still wait have waited too long already, and are added in the bucket of their
    # arrival. A look counts each of them once: when such a request ends, it leaves this snapshot and
    # comes into a bucket. So the evidence is never above that of all requests in the order of their
    # arrival, and the limit on false rollbacks holds.
    hanging = measured.hanging
    pairs = zip_longest(hanging.get("candidate", ()), hanging.get("baseline", ()), fillvalue=0)
    for back, (more_c, more_b) in enumerate(pairs, start=1):
        n_c, x_c, n_b, x_b = counts[-back]
        counts[-back] = BucketCounts(n_c + more_c, x_c + more_c, n_b + more_b, x_b + more_b)
    return counts


def _lost(measured: Published, *, name: Literal["cancelled", "refused"]) -> list[BucketCounts]:
    """Requests that ended without an answer, of those that were counted as well or as this."""

    def of(traffic: ArmTraffic) -> tuple[int, int]:
        lost: int | None = getattr(traffic, name)
        # An unknown count beside requests must not read as "nobody gave up".
        if lost is None:
            if traffic.requests > 0:
                raise Unusable(f"the counts of {name} requests are gone")
            return 0, 0
        return traffic.requests + lost, lost

    return [BucketCounts(*of(b.candidate), *of(b.baseline)) for b in measured.buckets]


def _publishes(metrics: MetricSeries | None, metric: str, counts: str) -> bool:
    return getattr(getattr(metrics, metric, None), counts, None) is not None


def _blank(measured: Published) -> list[BucketCounts]:
    def of(traffic: ArmTraffic) -> tuple[int, int]:
        if traffic.answered > 0 and traffic.empty is None:
            raise Unusable("the counts of empty answers are gone")
        if (traffic.empty or 0) > traffic.answered:
            raise Unusable("more empty answers than answers")
        return traffic.answered, traffic.empty or 0

    return [BucketCounts(*of(b.candidate), *of(b.baseline)) for b in measured.buckets]


def _latency(name: str) -> Callable[[CanaryRules], GateLimits | None]:
    return lambda plan: getattr(plan.latency_gates or LatencyGates(slow=None, very_slow=None), name)


def _callers(name: str) -> Callable[[CanaryRules], GateLimits | None]:
    return lambda plan: getattr(
        plan.caller_gates or CallerGates(abandoned=None, refused=None), name
    )


def _quality(name: str) -> Callable[[CanaryRules], GateLimits | None]:
    return lambda plan: getattr(plan.quality_gates or QualityGates(empty=None), name)


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
            "empty",
            "quality",
            _quality("empty"),
            _blank,
            partial(_publishes, metric="token_usage", counts="empty_count"),
            is_bad=lambda answer: not answer.completion.strip(),
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
            alpha_share=CALLERS_ALPHA,
        ),
        GateKind(
            "refused",
            "refused_requests",
            _callers("refused"),
            partial(_lost, name="refused"),
            partial(_publishes, metric="error_rate", counts="refused_count"),
            alpha_share=CALLERS_ALPHA,
        ),
    )
}

# What the traffic driver counts, by gate.
BAD_ANSWERS: Mapping[str, Callable[[Generation], bool]] = {
    name: kind.is_bad for name, kind in GATES.items() if kind.is_bad is not None
}
