"""Counts failed starts of replicas of one base model, and lengthens the pause before the next start.

The process that starts replicas counts them; others hear of them from it.
"""

import asyncio
from dataclasses import dataclass

# Longest pause between failed starts.
MAX_PAUSE_S = 30.0
# The pause is as long as it gets after so many; far more of them would double it to more than a float can hold.
MOST_DOUBLINGS = 5


@dataclass(frozen=True)
class FailedStarts:
    """The failed starts of replicas of one base model."""

    total: int = 0
    in_a_row: int = 0
    # Why the last one failed.
    error: str = ""
    # No start is tried before, by the loop's clock.
    until: float = 0.0

    @classmethod
    def heard(cls, total: int, in_a_row: int, error: str, pause_s: float) -> "FailedStarts":
        """Take over another process's failure, and start nothing for the next `pause_s` seconds."""
        return cls(total, in_a_row, error, asyncio.get_running_loop().time() + pause_s)

    @property
    def pause_s(self) -> float:
        """Seconds until a start may be tried; not positive where one may be."""
        return self.until - asyncio.get_running_loop().time()

    @property
    def is_pausing(self) -> bool:
        """Whether no start is tried now."""
        return self.pause_s > 0

    @property
    def why_not(self) -> str:
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
