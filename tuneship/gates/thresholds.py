"""Plain limits on the candidate's newest buckets, optional and in addition to the gates.

Pure. A value above its limit adds a reason to hold or to roll back; nothing here ever speaks for a promotion, and there
is no error rate: see `docs/gates.md`. Next: `canary.py`.
"""

from collections.abc import Sequence

from tuneship.gates.gate_types import ThresholdReading
from tuneship.gates.latency import has_latency, median_p95_ms
from tuneship.gates.metrics.series import Bucket, RolloutSeries
from tuneship.gates.plan import Thresholds


def read_thresholds(
    thresholds: Thresholds | None, series: RolloutSeries, buckets: Sequence[Bucket]
) -> tuple[ThresholdReading, ...]:
    """Read every threshold that is on, over the newest of the step's buckets with requests.

    A value is None where nothing measures it: too few requests, or a server that does not publish it.
    """
    if thresholds is None:
        return ()
    newest = [bucket.candidate for bucket in buckets if bucket.candidate.requests][
        -thresholds.looks :
    ]
    requests = sum(traffic.requests for traffic in newest)
    has_enough = requests >= thresholds.min_requests
    errors = _percentage(sum(traffic.errors for traffic in newest), requests)
    served = [traffic for traffic in newest if traffic.served]
    p95_ms = empty = None
    # A value over some of the buckets would pass for one over all of them.
    if served and all(map(has_latency, served)):
        p95_ms = median_p95_ms(served, series.edges_ms["candidate"])
    answered = [traffic for traffic in newest if traffic.answered]
    if all(traffic.empty is not None for traffic in answered):
        blank = sum(traffic.empty or 0 for traffic in answered)
        empty = _percentage(blank, sum(traffic.answered for traffic in answered))
    measured = (
        ("error_rate_percentage", "error_rate", thresholds.error_rate_percentage, errors),
        ("latency_p95_ms", "latency", thresholds.latency_p95_ms, p95_ms),
        ("empty_percentage", "quality", thresholds.empty_percentage, empty),
    )
    return tuple(
        ThresholdReading(name, reason, limit, value if has_enough else None, requests)
        for name, reason, limit, value in measured
        if limit is not None
    )


def _percentage(bad: int, requests: int) -> float | None:
    return 100.0 * bad / requests if requests else None
