"""Latency as a proportion: the share of answers above a limit, and the limits that the baseline's answers set.

Times are places among the cells of `cells.py`. A server that publishes cells is exact to 4.4 %; with a histogram,
limits are rounded up to its edges; with three quantiles, the share is read off a log-normal line. Pure arithmetic over
one series; knows no steps and no verdict. Next: `tallies.py`.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from datetime import timedelta

from tuneship.gates.gate_types import LatencyLimits, UsualHour
from tuneship.gates.metrics.series import ArmTraffic, Bucket, RolloutSeries, Unusable
from tuneship.gates.plan import CanaryRules
from tuneship.gates.statistics.cells import NO_CELLS, Cells, cell_of, value_at

# Baseline answers from which limits may be set.
ENOUGH_REQUESTS = 100
# Recent enough to be the load of today; with little traffic, enough buckets for a median of them.
FROZEN_FROM, LEAST_BUCKETS = timedelta(hours=1), 15
# A stretch of the baseline whose p95 is this many times the usual one had a stall and sets no limits.
STALLED_RATIO = 2.0
# Fewer answers say little about a p95, so neighbouring buckets are merged up to here.
_STRETCH_REQUESTS = 50
# 1.48 times the p99 is very slow.
VERY_SLOW_CELLS = 9
# Quantiles of the normal distribution.
_Z50, _Z95, _Z99 = 0.0, 1.6449, 2.3263
# A latency of 0 has no logarithm, and a deployment whose p50 is its p95 would divide by 0.
_LEAST_MS = 1e-6
_LEAST_SLOPE = 1e-9


def limits_from(
    traffic: Sequence[ArmTraffic], edges: Sequence[float] | None, *, per_token: bool = False
) -> LatencyLimits | None:
    """The limits that these buckets of the baseline set; None where they hold fewer than 100 answers."""
    traffic = _without_stalls(traffic, edges)
    requests = sum(arm.served for arm in traffic)
    if requests < ENOUGH_REQUESTS:
        return None
    shares = (0.5, 0.95, 0.99)
    counted = [arm.cells_per_token if per_token else arm.cells for arm in traffic]
    if all(cells is not None for cells in counted):
        merged = _sum([cells for cells in counted if cells is not None])
        p50, p95, p99 = (float(merged.quantile_cell(share)) for share in shares)
    else:
        p50, p95, p99 = (_quantile(traffic, edges, share) for share in shares)
    return LatencyLimits(
        value_at(p50), value_at(p95), value_at(p99 + VERY_SLOW_CELLS), requests, per_token
    )


def usual_hour(series: RolloutSeries, plan: CanaryRules) -> UsualHour:
    """The baseline in the last hour of a series from before the start, without its stalls."""
    chosen = last_hour(series.buckets)
    edges = series.edges_ms["baseline"]
    # Time per token is measured where the plan wants it and the server publishes it.
    latency = plan.latency_gates
    per_token = latency is not None and latency.per_output_token
    has_times = all(arm.cells_per_token is not None for arm in chosen)
    short, long = length_limits(chosen, plan) or (None, None)
    try:
        limits = limits_from(chosen, edges, per_token=per_token and has_times)
    except Unusable:  # buckets of servers that publish different counts
        limits = None
    return UsualHour(
        limits,
        short,
        long,
        max((load(arm) for arm in chosen), default=0.0),
    )


def freeze_limits(series: RolloutSeries, buckets: Sequence[Bucket]) -> LatencyLimits | None:
    """The limits that the baseline's last hour of these buckets sets, given in any order."""
    edges = series.edges_ms["baseline"]
    return limits_from(last_hour(buckets), edges)


def last_hour(buckets: Sequence[Bucket]) -> list[ArmTraffic]:
    """The baseline's traffic of the last hour, extended to 15 buckets where there is little traffic."""
    served = sorted(
        (b for b in buckets if b.baseline.served and has_latency(b.baseline)),
        key=lambda bucket: bucket.end,
    )
    hour = [bucket for bucket in served if bucket.end > served[-1].end - FROZEN_FROM]
    return [bucket.baseline for bucket in served[-max(len(hour), LEAST_BUCKETS) :]]


def length_limits(traffic: Sequence[ArmTraffic], plan: CanaryRules) -> tuple[float, float] | None:
    """Output tokens of an answer that is much shorter, or longer, than nearly all; None where lengths are not known."""
    if not traffic or any(arm.token_cells is None for arm in traffic):
        return None
    lengths = _sum([arm.token_cells or NO_CELLS for arm in traffic])
    if lengths.total < ENOUGH_REQUESTS:
        return None
    latency = plan.latency_gates
    is_meant = plan.output_length is None or (latency is not None and latency.per_output_token)
    longer = 2.0 if is_meant else 1.5
    return (
        value_at(lengths.quantile_cell(0.01)) / longer,
        value_at(lengths.quantile_cell(0.99)) * longer,
    )


def load(traffic: ArmTraffic) -> float:
    """Requests per running replica; 1 replica is assumed if the number is not published."""
    return traffic.requests / max(traffic.replicas or 1, 1)


def _without_stalls(
    chosen: Sequence[ArmTraffic], edges: Sequence[float] | None
) -> Sequence[ArmTraffic]:
    # A stall within the hour would raise the merged quantiles and blind the gates to a slow candidate.
    # Without counts the medians over buckets leave it out by themselves.
    if not chosen or not all(
        arm.cells is not None or (arm.histogram is not None and edges is not None) for arm in chosen
    ):
        return chosen
    stretches: list[list[ArmTraffic]] = [[]]
    for arm in chosen:
        if sum(of.served for of in stretches[-1]) >= _STRETCH_REQUESTS:
            stretches.append([])
        stretches[-1].append(arm)
    measured = [(_quantile(stretch, edges, 0.95), stretch) for stretch in stretches]
    usual = _weighted_median([(p95, sum(of.served for of in part)) for p95, part in measured])
    highest = usual + cell_of(STALLED_RATIO)
    return [arm for p95, part in measured if p95 <= highest for arm in part]


def least_slowdown(series: RolloutSeries, times: float) -> float | None:
    """How many times slower the baseline's p95 must become before coarse counts show that it is `times` slower.

    None where the server publishes cells, and where it publishes no histogram.
    """
    hour, edges = last_hour(series.buckets), series.edges_ms["baseline"]
    if edges is None or not hour or any(arm.histogram is None or arm.cells for arm in hour):
        return None
    # The limit is the edge above the p95, and what is slower must be beyond an edge so many times as far.
    finite = [edge for edge in edges if not math.isinf(edge)]
    p95 = max(median_p95_ms(hour, edges), _LEAST_MS)
    limit = next((edge for edge in finite if edge >= p95), finite[-1])
    return next((edge for edge in finite if edge >= times * limit), finite[-1]) / p95


def median_p95_ms(traffic: Sequence[ArmTraffic], edges: Sequence[float] | None) -> float:
    """p95 in ms of buckets that all have answers and their latency: of the merged counts, else the median."""
    if all(arm.cells is not None for arm in traffic):
        return value_at(_quantile(traffic, edges, 0.95))
    if edges is None or any(arm.histogram is None for arm in traffic):
        known = [(arm.quantiles_ms[1], arm.served) for arm in traffic if arm.quantiles_ms]
        return _weighted_median(known)
    # Between two edges, the share is taken to grow with the logarithm of the time.
    merged = [sum(column) for column in zip(*(arm.histogram or () for arm in traffic), strict=True)]
    wanted = 0.95 * merged[-1]
    i = bisect_left(merged, wanted)
    if i == 0:
        return edges[0] * wanted / merged[0]
    if math.isinf(edges[i]):
        return edges[i - 1]
    part = (wanted - merged[i - 1]) / (merged[i] - merged[i - 1])
    return edges[i - 1] * (edges[i] / edges[i - 1]) ** part


def has_latency(traffic: ArmTraffic) -> bool:
    """Whether the bucket says how long its answers took."""
    return (
        traffic.cells is not None
        or traffic.histogram is not None
        or traffic.quantiles_ms is not None
    )


def number_above(
    traffic: ArmTraffic,
    edges: Sequence[float] | None,
    place: float,
    *,
    per_token: bool = False,
    dither: float = 0.5,
) -> int:
    """Number of answers above the limit at this place among the cells.

    `dither`: where the number is only estimated, what decides how it is rounded; its mean over buckets must be 1/2.
    """
    cells = traffic.cells_per_token if per_token else traffic.cells
    if cells is not None:
        return cells.above(math.ceil(place - 1e-6))
    if traffic.histogram is not None and edges is not None:
        # Above the last finite edge nothing is known, and all counts as slow.
        i = min(bisect_left(edges, value_at(place) * (1 - 1e-9)), max(len(edges) - 2, 0))
        return traffic.histogram[-1] - (0 if math.isinf(edges[i]) else traffic.histogram[i])
    share = _share_above(traffic, value_at(place))
    return min(traffic.served, math.floor(share * traffic.served + dither))


def _share_above(traffic: ArmTraffic, threshold_ms: float) -> float:
    if traffic.quantiles_ms is None:
        raise Unusable("a bucket has answers without their latency")
    # Latencies are roughly log-normal, which is a straight line in (log latency, z): it runs through
    # p50 and p95, and above p95 through p95 and p99, since tails are heavier than that.
    p50, p95, p99 = map(_log, traffic.quantiles_ms)
    threshold = _log(threshold_ms)
    if threshold <= p95:
        z = _Z50 + (threshold - p50) / max((p95 - p50) / (_Z95 - _Z50), _LEAST_SLOPE)
    else:
        z = _Z95 + (threshold - p95) / max((p99 - p95) / (_Z99 - _Z95), _LEAST_SLOPE)
    return 0.5 * (1.0 - math.erf(z / math.sqrt(2.0)))


def _quantile(
    traffic: Sequence[ArmTraffic],
    edges: Sequence[float] | None,
    share: float,
) -> float:
    """The place of a quantile among the cells: of the sum of the counts, else the median over buckets by requests."""
    counted = [arm.cells for arm in traffic]
    if all(cells is not None for cells in counted):
        return _sum([cells for cells in counted if cells is not None]).quantile_cell(share)
    if edges is not None and all(arm.histogram is not None for arm in traffic):
        merged = [
            sum(column) for column in zip(*(arm.histogram or () for arm in traffic), strict=True)
        ]
        i = bisect_left(merged, share * merged[-1])
        return cell_of(max(edges[i - 1 if math.isinf(edges[i]) and i else i], _LEAST_MS))
    # Quantiles cannot be merged; the median is the one of a typical bucket.
    number = {0.5: 0, 0.95: 1, 0.99: 2}[share]
    known = [(arm.quantiles_ms, arm.served) for arm in traffic if arm.quantiles_ms is not None]
    median = _weighted_median([(quantiles[number], served) for quantiles, served in known])
    return cell_of(max(median, _LEAST_MS))


def _sum(cells: Sequence[Cells]) -> Cells:
    if len(cells) == 1:
        return cells[0]
    counts: dict[int, int] = {}
    for one in cells:
        for k, count in zip(one.index, one.count, strict=True):
            counts[k] = counts.get(k, 0) + count
    index = tuple(sorted(counts))
    return Cells(index, tuple(counts[k] for k in index))


def _weighted_median(values: Sequence[tuple[float, int]]) -> float:
    half = sum(weight for _, weight in values) / 2.0
    seen = 0
    for value, weight in sorted(values):
        seen += weight
        if seen >= half:
            return value
    raise Unusable("no bucket has a latency")


def _log(latency_ms: float) -> float:
    return math.log(max(latency_ms, _LEAST_MS))
