"""Compares what a deployment serves after the bake with its own first day.

Pure. Within the first day every stretch is compared with the hours before it (hour 2 with hour 1, hours 3 and 4 with
hours 1 and 2, ...); from then on each day with the first one, quarter hour with the same quarter hour, so that what
comes back every day is no finding. Each stretch is a test of its own that may be looked at at any time (`evidence.py`),
and their levels sum to `ALPHA` however long the deployment lives. Next:
`flows/upkeep/watch.py` reads the metrics and raises the alarms.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from tuneship.gates.kinds import GATES, Measured
from tuneship.gates.latency import freeze_limits, has_latency
from tuneship.gates.metrics.metrics_reader import Metrics, read_answer, read_series
from tuneship.gates.metrics.series import ARMS, ArmTraffic, Bucket, RolloutSeries, Unusable
from tuneship.gates.statistics import evidence
from tuneship.gates.statistics.evidence import BucketCounts, Limits, Terms
from tuneship.gates.tallies import one_per_caller

# Chance that a deployment whose behaviour never changes is ever reported, for any finding.
ALPHA: Final = 0.05
INTERVAL: Final = "15m"
QUARTER, DAY = timedelta(minutes=15), timedelta(days=1)
# In quarter hours.
HOUR_LONG, DAY_LONG = 4, 96
# A stretch is weighed from this many starting points, so that a good beginning does not hide a bad end.
STARTS: Final = 24
# By gate: the share allowed as a multiple of the first day's, and the share always allowed.
#
# Wider than a rollout's: days differ, and a person is called. The latency limits let pass what a
# busier day brings (all answers 1.6 times as slow) and find twice as slow.
LIMITS: Final[Mapping[str, Limits]] = {
    name: Limits(ratio, harm, harm)
    for name, ratio, harm in (
        ("error", 2.0, 0.02),
        ("slow", 4.0, 0.25),
        ("very_slow", 4.0, 0.03),
        ("empty", 2.0, 0.02),
        ("abandoned", 3.0, 0.05),
        ("refused", 3.0, 0.05),
    )
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Quarter hours `start` to `end` since the deployment began; compared with as many from its beginning on."""

    number: int
    start: int
    end: int

    @property
    def log_limit(self) -> float:
        """Levels fall with 1 / number^2, so that all of them sum to ALPHA."""
        # All findings of a stretch share its level alike (Bonferroni).
        return math.log(len(LIMITS) / ALPHA) + self._log_share

    @property
    def log_burst_limit(self) -> float:
        """The evidence limit for a single quarter hour, as a logarithm."""
        return evidence.LOG_FAST_TIER + self._log_share

    @property
    def _log_share(self) -> float:
        return math.log((math.pi * self.number) ** 2 / 6.0)


@dataclass(frozen=True, slots=True)
class WatchReading:
    """One gate in one stretch of time: shares now and on the first day, and the evidence against the deployment."""

    gate: str
    reason: str
    # The beginning of the stretch.
    begins: datetime
    requests: int
    bad: int
    first_requests: int
    first_bad: int
    log_e: float
    log_e_limit: float
    log_u: float
    log_u_limit: float

    @property
    def is_worse(self) -> bool:
        """Beyond the limits; by chance once in `1 / ALPHA` lives of deployments that stay as they were."""
        return self.log_e >= self.log_e_limit or self.log_u >= self.log_u_limit


@dataclass(frozen=True)
class Weighed:
    """The readings, and why a gate could not be weighed."""

    readings: tuple[WatchReading, ...]
    # Reason by gate.
    unusable: Mapping[str, str]


def rounded_up(moment: datetime) -> datetime:
    """The next full quarter hour."""
    since = moment.astimezone(UTC) - datetime.min.replace(tzinfo=UTC)
    return moment + (-since % QUARTER)


def first_traffic(answer: Metrics | None) -> datetime | None:
    """The beginning of the first quarter hour with requests. Raises `Unusable`."""
    buckets = read_series(answer, answer, INTERVAL).buckets
    return next((b.end - QUARTER for b in buckets if b.candidate.requests), None)


def stretches(began: datetime, now: datetime) -> tuple[Stretch, ...]:
    """The stretches of the last 24 hours; the first hour of a deployment has nothing to be compared with."""
    until = (now - began) // QUARTER
    every: list[Stretch] = []
    start = HOUR_LONG
    # Lengths double within the first day, since each stretch needs as many hours before it to be
    # compared with. The numbers count from the deployment's beginning: they set the levels.
    while start < until:
        length = min(start, DAY_LONG - start) if start < DAY_LONG else DAY_LONG
        every.append(Stretch(len(every) + 1, start, start + length))
        start += length
    return tuple(one for one in every if one.end > until - DAY_LONG)


def asked_from(began: datetime, now: datetime) -> datetime:
    """The start of the oldest stretch of the last 24 hours, where the needed metrics begin."""
    return began + min((one.start for one in stretches(began, now)), default=0) * QUARTER


def weigh(first: Metrics, recent: Metrics, began: datetime, now: datetime) -> Weighed:
    """Weigh every stretch of the last 24 hours. Raises `Unusable` where an answer as a whole cannot be counted.

    `first`: the metrics of the first day, as far as it has passed; `recent`: those from `asked_from` on.
    """
    then, lately = (read_series(answer, answer, INTERVAL) for answer in (first, recent))
    published = [read_answer(answer).metrics for answer in (first, recent)]
    pair = _Pair(then, lately, _by_number(then, began), _by_number(lately, began), began)
    unusable: dict[str, str] = {}
    readings: list[WatchReading] = []
    for stretch in stretches(began, now):
        measured = pair.measured(stretch)
        for name in LIMITS:
            # A count that the service began to publish later has nothing to be compared with.
            if all(map(GATES[name].is_published, published)):
                try:
                    readings.append(_read(name, stretch, measured, began))
                except Unusable as error:
                    unusable[name] = str(error)
    return Weighed(tuple(readings), unusable)


def _by_number(series: RolloutSeries, began: datetime) -> dict[int, ArmTraffic]:
    return {(b.end - began) // QUARTER - 1: b.candidate for b in series.buckets}


@dataclass(frozen=True)
class _Pair:
    """The first day as the baseline of now."""

    then: RolloutSeries
    lately: RolloutSeries
    first: Mapping[int, ArmTraffic]
    recent: Mapping[int, ArmTraffic]
    began: datetime

    def measured(self, stretch: Stretch) -> list[Measured]:
        """The stretch and the hours to compare it with; these also set the latency limits."""
        # A stretch may be looked at before it is over. The limits come from all the hours it is
        # compared with, so that they stay the same until then.
        ends = min(stretch.end, max(self.recent, default=-1) + 1)
        buckets = [self._bucket(number, stretch) for number in range(stretch.start, ends)]
        whole = [self._bucket(number, stretch) for number in range(stretch.start, stretch.end)]
        edges = (self.then.edges_ms["candidate"], self.lately.edges_ms["candidate"])
        answered = [b for b in whole if b.baseline.served and has_latency(b.baseline)]
        as_baseline = replace(self.lately, edges_ms=dict.fromkeys(ARMS, edges[0]))
        limits = freeze_limits(as_baseline, answered) if answered else None
        return [Measured(bucket, edges, limits) for bucket in buckets]

    def _bucket(self, number: int, stretch: Stretch) -> Bucket:
        then = self.first.get(number - stretch.start, ArmTraffic())
        end = self.began + (number + 1) * QUARTER
        return Bucket(end, then, self.recent.get(number, ArmTraffic()))


def _read(
    name: str, stretch: Stretch, measured: Sequence[Measured], began: datetime
) -> WatchReading:
    kind = GATES[name]
    if kind.count is None:
        raise Unusable(f"the service publishes no counts for the gate {name}")
    counts = [kind.count(one, LIMITS[name]) for one in measured]
    weighed = _evidence(counts, LIMITS[name], stretch)
    alone = weighed
    # Repeats of one caller depend on each other. Over many quarter hours the cap on bursts allows for
    # it; where a single one may decide, they count once.
    if name == "error":
        distinct = [
            one_per_caller(one.bucket.candidate.error_callers, count)
            for one, count in zip(measured, counts, strict=True)
        ]
        alone = _evidence(distinct, LIMITS[name], stretch)
    return WatchReading(
        gate=name,
        reason=kind.reason,
        begins=began + stretch.start * QUARTER,
        requests=sum(one.n_c for one in counts),
        bad=sum(one.x_c for one in counts),
        first_requests=sum(one.n_b for one in counts),
        first_bad=sum(one.x_b for one in counts),
        log_e=weighed.log_e,
        log_e_limit=stretch.log_limit,
        log_u=alone.log_uncapped,
        log_u_limit=stretch.log_burst_limit,
    )


def _evidence(counts: Sequence[BucketCounts], limits: Limits, stretch: Stretch) -> evidence.Harm:
    """Weigh from equally spaced starts with equal weights; a start that is still to come counts once."""
    # All starts are known beforehand, unlike those of a rollout, so that equal weights sum to 1.
    length = stretch.end - stretch.start
    starts = range(0, length, max(1, length // STARTS))
    terms = Terms(tuple(starts), (1.0 / len(starts),) * len(starts), 0.0)
    return evidence.harm(counts, limits, terms)
