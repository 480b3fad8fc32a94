"""The watch over a running job, poll by poll."""

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from tuneship.gates.training.divergence import (
    DivergenceWatch,
    is_diverging,
    noise_of,
    watch_training,
)


def polls(*curves: dict[str, Any], warmup: int = 0) -> list[str | None]:
    watch, names = DivergenceWatch(), list[str | None]()
    for curve in curves:
        watch, gate = watch_training(watch, curve, warmup)
        names.append(gate.name if gate else None)
    return names


def curve(losses: Sequence[float | None]) -> dict[str, Any]:
    return {"steps": list(range(1, len(losses) + 1)), "training_loss": losses}


def test_losses_that_stay_broken_cancel_at_the_second_poll() -> None:
    broken = curve([1.0, math.nan, math.nan, math.nan])
    assert polls(curve([1.0]), broken, broken) == [None, None, "T1 finite"]


def test_a_broken_loss_among_hundreds_does_not_cancel() -> None:
    losses: list[float | None] = [1.0] * 150
    losses[100] = math.nan
    losses[101] = None
    assert polls(*[curve(losses[:count]) for count in range(95, 150, 3)]) == [None] * 19


def test_a_single_bad_poll_is_forgiven() -> None:
    good, bad = curve([1.0]), curve([None] * 3)
    assert polls(bad, good, bad, good) == [None] * 4


def grown(*losses: float, by: int, times: int) -> list[dict[str, Any]]:
    """Curves that end in more and more of the last loss."""
    return [curve([*losses, *[losses[-1]] * (by * n)]) for n in range(times)]


def test_a_diverging_loss_cancels_at_the_third_poll_that_brings_steps_and_after_forty() -> None:
    up = [*[1.0] * 10, *[9.0] * 30]
    assert polls(*grown(*up, by=20, times=4)) == [None, None, "T2 divergence", "T2 divergence"]
    assert polls(*grown(*up, by=5, times=10))[6:9] == [None, None, "T2 divergence"]
    same = curve([*up, *[9.0] * 60])
    assert polls(*[same] * 9) == [None] * 9, "polls without a new step say nothing"


def test_one_poll_without_divergence_begins_the_count_again() -> None:
    up = grown(*[1.0] * 10, *[9.0] * 10, by=20, times=4)
    calm = curve([1.0] * 200)
    after = [curve([1.0] * 200 + [9.0] * (40 + 20 * more)) for more in range(3)]
    assert polls(*up[:2], calm, *after) == [None] * 5 + ["T2 divergence"]


def test_the_noise_of_a_small_loss_is_no_divergence() -> None:
    tuned = [6.0] * 5 + [0.07] * 40
    noisy = [curve([*tuned, *[0.2] * more]) for more in (8, 10, 12, 14)]
    assert polls(*noisy) == [None, None, None, None]


def test_a_loss_that_comes_back_from_low_is_a_divergence() -> None:
    tuned = [*[6.0] * 5, *[0.07] * 60, 5.0]
    assert polls(*grown(*tuned, by=20, times=5))[-1] == "T2 divergence"


def test_the_noise_of_a_job_widens_its_limits() -> None:
    draw = Random(1)  # noqa: S311 - a test draws these numbers
    quiet, noisy = (
        [math.exp(draw.gauss(0.0, deviation)) for _ in range(60)] for deviation in (0.01, 0.7)
    )
    assert noise_of(noisy) > 20 * noise_of(quiet)
    assert is_diverging([*quiet, *[1.3] * 50])
    assert not is_diverging([*noisy, *[1.3] * 50])


def test_a_server_that_logs_every_twentieth_step_is_watched_like_another() -> None:
    def logged(count: int, high: int) -> dict[str, Any]:
        losses = [1.0] * (count - high) + [9.0] * high
        return {"steps": [20 * (n + 1) for n in range(count)], "training_loss": losses}

    worse = [logged(40 + high, high) for high in (20, 30, 40, 50, 60)]
    assert polls(*worse)[-1] == "T2 divergence"
    assert polls(*[logged(count, 0) for count in range(1, 60)]) == [None] * 59


def test_a_warm_up_that_starts_high_is_no_divergence() -> None:
    losses = [9.0, 8.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.4, 1.3]
    assert polls(*[curve(losses[:n]) for n in range(3, 10)]) == [None] * 7
    assert polls(*[curve([1.0, 2.0][:n]) for n in (1, 2)], warmup=5) == [None, None]


def test_an_empty_record_is_no_evidence() -> None:
    assert polls(curve([]), curve([])) == [None, None]
