"""How fast a training goes, for whoever waits for it: tokens a second, seconds a step. Knows no model.

Told beside the steps, in lines of their own: a step's line is the same in every attempt, a duration is not.
Next: `run.py` (who learns), `tuneship/service/jobs/record_progress.py` (who tells when the job will end).
"""

from collections import deque
from collections.abc import Callable
from typing import Any

# Tokens a second are those of so many steps, so that a machine that gets busy shows.
RECENT_STEPS = 50
TELL_EVERY_S = 1.0


class TrainingSpeed:
    """Of one attempt, from the moment when it is made."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds, monotonic."""
        self._clock = clock
        self._began = self._step_began = clock()
        self._told_at = -TELL_EVERY_S + self._began
        self._steps = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)

    def begin_step(self) -> None:
        """The next step's time runs from here: measuring and saving between two steps is not its."""
        self._step_began = self._clock()

    def end_step(self, tokens: int) -> None:
        """`tokens` without padding were learnt from."""
        self._steps += 1
        self._recent.append((tokens, self._clock() - self._step_began))

    def news(self) -> dict[str, Any] | None:
        """What there is to tell, at most once a second. `seconds_per_step` holds measuring and saving too."""
        now = self._clock()
        if now - self._told_at < TELL_EVERY_S:
            return None
        self._told_at = now
        seconds = sum(seconds for _, seconds in self._recent)
        return {
            "tokens_per_second": sum(tokens for tokens, _ in self._recent) / max(seconds, 1e-9),
            "seconds_per_step": (now - self._began) / max(self._steps, 1),
        }
