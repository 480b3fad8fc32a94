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
    # Requests per minute in each of the next 24 hours, taken from the same hours a day ago; empty: as in
    # the last hour.
    by_hour: tuple[float, ...] = ()

    def rate_after(self, minutes: float) -> float:
        """Expected requests per minute, this many minutes from now."""
        hour = int(minutes // 60)
        # What happens now is known better from the last hour than from yesterday.
        return (
            self.by_hour[hour % len(self.by_hour)]
            if self.by_hour and hour
            else self.requests_per_minute
        )

    def busiest_within(self, minutes: float) -> float:
        """The largest of the expected rates, in requests per minute."""
        return max(self.rate_after(60.0 * hour) for hour in range(int(minutes // 60) + 1))


@dataclass(frozen=True)
class Unprovable:
    """A property that this plan cannot show at this traffic, and why."""

    # A gate's name, `insufficient_data`, `baseline_unhealthy` or `doubling`.
    what: str
    why: str


@dataclass(frozen=True)
class Forecast:
    """Minutes from the first shift, as quantiles over all simulated rollouts; None if too few of them get that far."""

    # Time to the promotion of an equal candidate: half of them, and nine of ten.
    promote_minutes: float | None = None
    promote_minutes_most: float | None = None
    # The same to the rollback of a candidate with twice the errors, and with five percentage points more.
    doubling_minutes: float | None = None
    doubling_minutes_most: float | None = None
    more_errors_minutes: float | None = None
    more_errors_minutes_most: float | None = None
    unprovable: tuple[Unprovable, ...] = ()
    # Simulated equal candidates: all, those that were promoted and within how many minutes the last of
    # them, and those that ended undecided. The rest was rolled back.
    drawn: int = 0
    promoted: int = 0
    slowest_minutes: float | None = None
    undecided: int = 0

    @property
    def lacks_traffic(self) -> bool:
        """Whether no equal candidate was promoted, for another reason than a bad baseline."""
        # A sick baseline keeps every candidate from a proof, so nothing follows about the traffic.
        is_sick = any(one.what == UNHEALTHY_BASELINE for one in self.unprovable)
        return not self.promoted and not is_sick
