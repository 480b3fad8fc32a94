"""When the model is measured and how fast it learns: pure functions of the step number.

Steps count from 1. Next: `tuneship/training/run.py`.
"""

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Linear warm-up to `peak`, then linear decay to nothing after the last step.

    Linear and not cosine: at equal compute a straight way to zero ends lowest (Bergsma et al. 2025,
    "Straight to Zero"), and it is what transformers' Trainer does, so runs can be compared.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    return peak * (total_steps - step + 1) / (total_steps - warmup_steps)


def evaluation_steps(
    validation_frequency: float, *, steps_per_epoch: int, total_steps: int
) -> frozenset[int]:
    """After which steps the model is measured; always after the last.

    `validation_frequency` up to 1 is a fraction of an epoch, from 2 on a number of steps.
    """
    if validation_frequency > 1:
        interval = float(int(validation_frequency))
    else:
        interval = max(1.0, validation_frequency * steps_per_epoch)
    count = int(total_steps / interval)
    # The small number keeps 0.1 * 30 steps at 3, not at 4.
    steps = {math.ceil(number * interval - 1e-6) for number in range(1, count + 1)}
    return frozenset(steps | {total_steps})
