"""The training gates as they were, in a few lines each, for the column "before" of the table."""

from collections.abc import Sequence

from tuneship.gates.smoke_test import SmokeAnswer

PROMPTS = 10


def is_diverging(losses: Sequence[float]) -> bool:
    """T2 by a moving average over about ten steps, beside its minimum and the very first loss."""
    smoothed = lowest = losses[0]
    for loss in losses[1:]:
        smoothed += (loss - smoothed) * 2.0 / 11.0
        lowest = min(lowest, smoothed)
    has_risen = smoothed > 2.0 * lowest and smoothed - lowest > 0.1 * losses[0]
    return has_risen or smoothed > 1.5 * losses[0]


def learned(losses: Sequence[float]) -> str:
    """T3 by the lowest measurement."""
    return "pass" if min(losses) <= 0.98 * losses[0] else "reject"


def against_champion(losses: Sequence[float], champion: float) -> str:
    """T4 by the lowest measurement, 0.02 nats around the champion's own."""
    return "pass" if min(losses) <= champion + 0.02 else "reject"


def smoke(candidate: Sequence[SmokeAnswer]) -> str:
    """T10 by any fault of the candidate."""
    return "reject" if any(answer.problem for answer in candidate) else "pass"
