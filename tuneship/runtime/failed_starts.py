"""Starts of replicas of one base model that have failed, and the pause before the next one: longer each time."""

import asyncio
from dataclasses import dataclass

# Longest pause between failed starts.
MAX_PAUSE_S = 30.0
# The pause is as long as it gets after so many; far more of them would double it to more than a float can hold.
MOST_DOUBLINGS = 5


@dataclass(frozen=True)
class FailedStarts:
    """How the starts of replicas of one base model have gone."""

    total: int = 0
    in_a_row: int = 0
    error: str = ""
    """Why the last one failed."""
    until: float = 0.0
    """No start is tried before, by the loop's clock."""

    @property
    def is_pausing(self) -> bool:
        """Whether no start is tried now."""
        return asyncio.get_running_loop().time() < self.until

    @property
    def refusal(self) -> str:
        """Why no start is tried now; empty where one may be."""
        return self.error if self.is_pausing else ""

    def with_failure(self, error: str) -> "FailedStarts":
        """Count one more that has failed, now."""
        pause = min(MAX_PAUSE_S, 2.0 ** min(self.in_a_row, MOST_DOUBLINGS))
        until = asyncio.get_running_loop().time() + pause
        return FailedStarts(self.total + 1, self.in_a_row + 1, error, until)

    def with_success(self) -> "FailedStarts":
        """Begin again with short pauses."""
        return FailedStarts(self.total)
