"""The finished buckets of two deployments, joined by time: the data of one look at a rollout.

Knows no gate and no rollout. Next: `metrics_reader.py` reads a series from two metrics answers, `tallies.py` counts
it for the gates, `curves.py` pools it for pictures.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

from tuneship.gates.statistics.cells import Cells

Arm = Literal["baseline", "candidate"]
ARMS: Final[tuple[Arm, Arm]] = ("baseline", "candidate")


class Unusable(Exception):
    """An answer cannot be counted, so that the look counts as missing; the message says why."""


@dataclass(frozen=True, slots=True)
class ArmTraffic:
    """One deployment in one bucket. None means "not published"."""

    requests: int = 0
    errors: int = 0
    empty: int | None = None
    output_tokens: float | None = None
    # p50, p95, p99 of the successful requests.
    quantiles_ms: tuple[float, float, float] | None = None
    # Successful requests at or below each edge of `RolloutSeries.edges_ms`.
    histogram: tuple[int, ...] | None = None
    # Whether the throughput entry was null.
    unvalued: bool = False
    # Callers who disconnected before their answer ended; not part of `requests`.
    cancelled: int | None = field(default=None, repr=False)
    # Requests that the deployment itself refused (too long a prompt, ...); not part of `requests`.
    refused: int | None = field(default=None, repr=False)
    # Distinct callers among the errors.
    error_callers: int | None = field(default=None, repr=False)
    # Times of whole answers in ms, and ms per output token of each request.
    cells: Cells | None = field(default=None, repr=False)
    cells_per_token: Cells | None = field(default=None, repr=False)
    # Output tokens per answer.
    token_cells: Cells | None = field(default=None, repr=False)
    # Distinct callers among the cancelled and the refused requests.
    cancelled_callers: int | None = field(default=None, repr=False)
    refused_callers: int | None = field(default=None, repr=False)
    # Callers with more than their share, whose requests are drawn one by one; and the number of callers
    # that make up half of the requests.
    spread_keys: int | None = field(default=None, repr=False)
    callers_of_half: int | None = field(default=None, repr=False)
    # Replicas that were running.
    replicas: int | None = field(default=None, repr=False)

    @property
    def served(self) -> int:
        """Answers with a counted latency; the shares of slow answers refer to them. Our service leaves out those of
        batches.
        """
        if self.cells is not None:
            return self.cells.total
        return self.histogram[-1] if self.histogram else self.answered

    @property
    def answered(self) -> int:
        """Requests that were answered."""
        return self.requests - self.errors


@dataclass(frozen=True, slots=True)
class Bucket:
    """One finished bucket of both deployments."""

    end: datetime
    baseline: ArmTraffic
    candidate: ArmTraffic

    def __getitem__(self, arm: Arm) -> ArmTraffic:
        return self.baseline if arm == "baseline" else self.candidate


@dataclass(frozen=True, slots=True)
class InFlightAges:
    """Requests of one deployment that are still being answered at `RolloutSeries.at`, counted by their greatest age."""

    edges_ms: tuple[float, ...]
    counts: tuple[int, ...]

    def older_than(self, age_ms: float) -> list[tuple[float, float, int]]:
        """List the requests that are certainly older: their least and greatest age in ms, and how many."""
        # Those of the bucket in which the age lies may be younger: they are not certain.
        first = bisect_left(self.edges_ms, age_ms)
        return [
            (self.edges_ms[i], self.edges_ms[i + 1], self.counts[i + 1] - self.counts[i])
            for i in range(first, len(self.counts) - 1)
            if self.counts[i + 1] > self.counts[i]
        ]


@dataclass(frozen=True)
class RolloutSeries:
    """The data of one look, by the service's clock: finished buckets, ascending, and how fresh each arm is."""

    buckets: tuple[Bucket, ...]
    # The later `end_time` of the two answers.
    at: datetime
    # Per arm the end of the newest bucket with a throughput value, finished or not.
    newest: Mapping[Arm, datetime | None]
    edges_ms: Mapping[Arm, tuple[float, ...] | None]
    # Requests that each arm is still answering; None: not published.
    in_flight: Mapping[Arm, InFlightAges | None] = field(
        default_factory=dict[Arm, InFlightAges | None]
    )

    @property
    def horizon(self) -> datetime | None:
        """End of the newest finished bucket."""
        return self.buckets[-1].end if self.buckets else None


def first_after(buckets: Sequence[Bucket], moment: datetime | None) -> int:
    """Index of the first bucket that ended after `moment` (None: of the first bucket)."""
    if moment is None:
        return 0
    return bisect_right(buckets, moment, key=lambda bucket: bucket.end)
