"""When the model is evaluated and the learning rate of each step: pure functions of the step number.

Steps count from 1. Next: `training_loop.py`.
"""

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Linear warm-up to `peak`, then linear decay to zero after the last step.

    Linear and not cosine: at equal compute a linear decay to zero ends with the lowest loss (Bergsma et al. 2025,
    "Straight to Zero"), and transformers' Trainer does the same, so runs can be compared.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    return peak * (total_steps - step + 1) / (total_steps - warmup_steps)


class EvaluationSchedule:
    """The steps after which the model is evaluated: at regular intervals, and always after the last step.

    Every answer is computed from the step number. A list of these steps would grow with the length of the job, which
    its owner chooses: 500 million steps are one small request.
    """

    def __init__(
        self, validation_frequency: float, *, steps_per_epoch: int, total_steps: int
    ) -> None:
        """`validation_frequency`: up to 1 a fraction of an epoch, from 2 on a number of steps."""
        if validation_frequency > 1:
            self._interval = float(int(validation_frequency))
        else:
            self._interval = max(1.0, validation_frequency * steps_per_epoch)
        self._total_steps = total_steps

    def is_due(self, step: int) -> bool:
        """Whether the model is evaluated after this step (from 1 on)."""
        return self.count(step) > self.count(step - 1)

    def count(self, step: int) -> int:
        """The number of evaluations from step 1 up to and including `step`."""
        intervals = self._intervals_until(min(step, self._total_steps))
        if step < self._total_steps:
            return intervals
        is_last_regular = intervals > self._intervals_until(self._total_steps - 1)
        return intervals if is_last_regular else intervals + 1

    def _intervals_until(self, step: int) -> int:
        """The number of intervals that have ended by `step`, each rounded up to a whole step."""
        # The small number absorbs rounding: an interval of 0.1 * 30 ends with step 3, not with step 4.
        return math.floor((step + 1e-6) / self._interval)
