"""What a forecast takes and tells, as plain data, so that a record can keep it. Next: `forecast.py` makes one."""

from dataclasses import dataclass

INSUFFICIENT_DATA, UNHEALTHY_BASELINE, DOUBLING = (
    "insufficient_data",
    "baseline_unhealthy",
    "doubling",
)


@dataclass(frozen=True)
class Today:
    """The baseline as the last hour showed it. Shares are of its requests."""

    requests_per_minute: float
    """Of the endpoint, all deployments together."""
    errors: float = 0.0
    blank: float = 0.0
    abandoned: float = 0.0
    refused: float = 0.0


@dataclass(frozen=True)
class Unprovable:
    """Something that this plan cannot show at this traffic, and why."""

    what: str
    """A gate's name, `insufficient_data`, `baseline_unhealthy` or `doubling`."""
    why: str


@dataclass(frozen=True)
class Forecast:
    """Minutes from the first shift. None: not to be expected within the plan's looks."""

    promote_minutes: float | None
    """Until an equal candidate is promoted: the median, ..."""
    promote_minutes_most: float | None
    """... and what nine of ten do not exceed."""
    doubling_minutes: float | None
    """Until a candidate with twice the errors is rolled back."""
    more_errors_minutes: float | None
    """Until a candidate with five points more errors is rolled back."""
    unprovable: tuple[Unprovable, ...]
    sentence: str
    promoted_share: float = 0.0
    """Of the equal candidates that were drawn, this share was promoted."""

    @property
    def lacks_traffic(self) -> bool:
        """No equal candidate was promoted, and not because the baseline is bad."""
        is_sick = any(one.what == UNHEALTHY_BASELINE for one in self.unprovable)
        return not self.promoted_share and not is_sick
