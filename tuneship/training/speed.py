"""The speed of a training: tokens per second and seconds per step. Knows no model.

Reported in lines of their own beside the steps: a step's line is the same in every attempt, a duration is not. Next:
`training_loop.py` (reports it), `tuneship/service/jobs/record_progress.py` (estimates from it when the job will end).
"""

from collections import deque
from collections.abc import Callable
from typing import Any

# Tokens per second are averaged over so many steps, so that a machine that gets busy shows.
RECENT_STEPS = 50
REPORT_INTERVAL_S = 1.0


class TrainingSpeed:
    """The speed of one attempt, from the construction of this object."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds and never goes backwards."""
        self._clock = clock
        self._began = self._step_began = clock()
        self._reported_at = -REPORT_INTERVAL_S + self._began
        self._steps = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)

    def begin_step(self) -> None:
        """Start the clock of a step; evaluations and checkpoints before it do not count as its time."""
        self._step_began = self._clock()

    def end_step(self, tokens: int) -> None:
        """Stop the clock of a step with this many tokens, not counting padding."""
        self._steps += 1
        self._recent.append((tokens, self._clock() - self._step_began))

    def due_report(self) -> dict[str, Any] | None:
        """The fields of a progress line, at most once a second, else None.

        `seconds_per_step` includes evaluations and checkpoints, `tokens_per_second` does not.
        """
        now = self._clock()
        if now - self._reported_at < REPORT_INTERVAL_S:
            return None
        self._reported_at = now
        seconds = sum(seconds for _, seconds in self._recent)
        return {
            "tokens_per_second": sum(tokens for tokens, _ in self._recent) / max(seconds, 1e-9),
            "seconds_per_step": (now - self._began) / max(self._steps, 1),
        }
