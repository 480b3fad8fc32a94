"""The inputs and results of a forecast as plain data, so that a record can keep them. Next: `forecast.py`."""

from dataclasses import dataclass

INSUFFICIENT_DATA, UNHEALTHY_BASELINE, DOUBLING = (
    "insufficient_data",
    "baseline_unhealthy",
    "doubling",
)


@dataclass(frozen=True)
class Today:
    """Traffic of the last hour. Shares are of the baseline's requests, 0..1."""

    # Traffic of the endpoint, all deployments together.
    requests_per_minute: float
    errors: float = 0.0
    blank: float = 0.0
    abandoned: float = 0.0
    refused: float = 0.0


@dataclass(frozen=True)
class Unprovable:
    """A property that this plan cannot show at this traffic, and why."""

    # A gate's name, `insufficient_data`, `baseline_unhealthy` or `doubling`.
    what: str
    why: str


@dataclass(frozen=True)
class Forecast:
    """Minutes from the first shift; None where the event is not expected within the plan's looks."""

    # Median time to the promotion of an equal candidate.
    promote_minutes: float | None
    # The same, 90th percentile.
    promote_minutes_most: float | None
    # Median time to the rollback of a candidate with twice the errors.
    doubling_minutes: float | None
    # Median time to the rollback of a candidate with five percentage points more errors.
    more_errors_minutes: float | None
    unprovable: tuple[Unprovable, ...]
    sentence: str
    # Share of the simulated equal candidates that was promoted.
    promoted_share: float = 0.0

    @property
    def lacks_traffic(self) -> bool:
        """Whether no equal candidate was promoted, for another reason than a bad baseline."""
        # A sick baseline keeps every candidate from a proof, so nothing follows about the traffic.
        is_sick = any(one.what == UNHEALTHY_BASELINE for one in self.unprovable)
        return not self.promoted_share and not is_sick
