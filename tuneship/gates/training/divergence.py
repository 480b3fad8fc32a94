"""Watches a running job, and cancels it when its losses are no longer finite (T1) or diverge (T2).

Losses of small batches are noisy, so T2 compares medians, and its limits grow with the noise that the job itself shows
after its warm-up. Next: `training_gates.py` judges the job once it has ended.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from tuneship.gates.gate_result import GateResult
from tuneship.gates.training.frames import UnreadableMetrics, lowest_median, read_curve

# Consecutive polls before a running job is cancelled, since one may catch a batch of bad luck.
LIVE_BROKEN_POLLS, LIVE_DIVERGING_POLLS = 2, 3
# Steps over which it must diverge, and losses that they must bring: polls may follow each other faster than news.
LIVE_DIVERGING_STEPS, LIVE_DIVERGING_LOSSES = 40, 10
# A model whose weights are broken has no finite loss again; one such batch says nothing.
BROKEN_LOSSES = 3
# Losses whose median is the reference, those whose median is compared with it, and the fewest of these.
REFERENCE_LOSSES, NEWEST_LOSSES, FEWEST_NEWEST = 10, 50, 30
# The noise of a single loss is measured from as many of the first differences as there are before the newest losses,
# within these bounds. From 50 alone it came out too small by a third in some jobs, and 2 % of long, noisy ones were
# cancelled.
FEWEST_DIFFERENCES, MOST_DIFFERENCES = 50, 150
# Three standard errors of a median, which are 1.253 times those of a mean; and more for the lowest of many medians,
# which is low by luck.
ERRORS, ERRORS_OVER_LOWEST = 3.76, 5.6
# A smaller rise over the reference or over the lowest median is none, however quiet the job is.
LEAST_RISE, LEAST_RISE_OVER_LOWEST = 1.1, 1.5
# Turns a median of absolute deviations into a standard deviation.
MAD_TO_DEVIATION = 1.48
SMALLEST_LOSS, LARGEST_LOSS = 1e-9, 1e30


@dataclass(frozen=True)
class DivergenceWatch:
    """State carried from poll to poll of a running job."""

    broken_polls: int = 0
    diverging_polls: int = 0
    # The step at the first of these polls.
    diverging_since: int = 0
    step: int = 0


def watch_training(
    watch: DivergenceWatch, metrics: Mapping[str, Any], warmup_steps: int
) -> tuple[DivergenceWatch, GateResult | None]:
    """Poll once: return the next watch, and a rejecting gate if the job should be cancelled."""
    try:
        curve = read_curve(metrics)
    except UnreadableMetrics:
        return _broken(watch)
    newest = curve.values("training_loss")[-BROKEN_LOSSES:]
    if len(newest) == BROKEN_LOSSES and not any(map(math.isfinite, newest)):
        return _broken(watch)
    later = curve.after_step(warmup_steps)
    return watch_losses(watch, list(later.frame.index), later.values("training_loss"))


def watch_losses(
    watch: DivergenceWatch, steps: Sequence[int], losses: Sequence[float]
) -> tuple[DivergenceWatch, GateResult | None]:
    """Poll once, with the losses of the steps after the warm-up."""
    step, since = steps[-1] if steps else 0, watch.diverging_since
    # Readable losses end a row of broken polls; without a new step nothing is known about divergence.
    if step <= watch.step:
        return DivergenceWatch(0, watch.diverging_polls, since, watch.step), None
    if not is_diverging(losses):
        return DivergenceWatch(step=step), None
    polls, since = watch.diverging_polls + 1, since if watch.diverging_polls else step
    after = DivergenceWatch(0, polls, since, step)
    least = max(LIVE_DIVERGING_STEPS, LIVE_DIVERGING_LOSSES * (step - steps[-2]))
    if polls < LIVE_DIVERGING_POLLS or step - since < least:
        return after, None
    note = f"at {polls} polls running, over {step - since} steps"
    return after, GateResult("T2 divergence", "reject", note=note)


def _broken(watch: DivergenceWatch) -> tuple[DivergenceWatch, GateResult | None]:
    polls = watch.broken_polls + 1
    after = DivergenceWatch(polls, watch.diverging_polls, watch.diverging_since, watch.step)
    if polls < LIVE_BROKEN_POLLS:
        return after, None
    return after, GateResult("T1 finite", "reject", polls, LIVE_BROKEN_POLLS, "polls running")


def is_diverging(losses: Sequence[float]) -> bool:
    """Whether the median of the newest losses exceeds that of the first or of the lowest ones by more than noise.

    `losses` are those after the warm-up; those that are not finite are left out.
    """
    # Between these bounds no power is too large for a float.
    finite = [min(max(loss, SMALLEST_LOSS), LARGEST_LOSS) for loss in losses if math.isfinite(loss)]
    count = min(NEWEST_LOSSES, len(finite) - REFERENCE_LOSSES)
    if count < FEWEST_NEWEST:
        return False
    # The newest losses of a diverging job may have another noise, or none.
    differences = min(max(FEWEST_DIFFERENCES, len(finite) - count - 1), MOST_DIFFERENCES)
    noise, newest = noise_of(finite[: differences + 1]), median(finite[-count:])
    rise = math.exp(ERRORS * noise * math.sqrt(1 / REFERENCE_LOSSES + 1 / count))
    if newest > median(finite[:REFERENCE_LOSSES]) * max(LEAST_RISE, rise):
        return True
    rise = math.exp(ERRORS_OVER_LOWEST * noise * math.sqrt(2 / count))
    return newest > lowest_median(finite, count) * max(LEAST_RISE_OVER_LOWEST, rise)


def noise_of(losses: Sequence[float]) -> float:
    """The standard deviation of the logarithm of a single loss, from the differences between these losses."""
    logs = [math.log(loss) for loss in losses]
    differences = [after - before for before, after in pairwise(logs)]
    middle = median(differences)
    spread = median(abs(one - middle) for one in differences)
    # A difference has the noise of two losses.
    return MAD_TO_DEVIATION * spread / math.sqrt(2)
