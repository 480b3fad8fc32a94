"""Tests of when a training measures its model, and of how little that decision costs."""

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneship.training.schedule import EvaluationSchedule

# Steps of the longest job that the API accepts: 100,000 examples, one at a time, 10,000 epochs, half of them.
FIVE_HUNDRED_MILLION = 500_000_000


def measured(frequency: float, steps_per_epoch: int, total_steps: int) -> list[int]:
    schedule = EvaluationSchedule(
        frequency, steps_per_epoch=steps_per_epoch, total_steps=total_steps
    )
    return [step for step in range(1, total_steps + 1) if schedule.is_due(step)]


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [
        (0.25, [25, 50, 75, 100, 125, 150, 175, 200]),
        (1, [100, 200]),
        (0.3, [30, 60, 90, 120, 150, 180, 200]),
        (64, [64, 128, 192, 200]),
        (0.001, list(range(1, 201))),
        (1000, [200]),
    ],
)
def test_the_model_is_measured_at_the_asked_frequency_and_at_the_end(
    frequency: float, expected: list[int]
) -> None:
    assert measured(frequency, 100, 200) == expected


def test_a_fraction_of_an_odd_epoch_is_never_skipped() -> None:
    assert measured(0.1, 30, 30) == list(range(3, 31, 3))
    assert measured(0.5, 5, 10) == [3, 5, 8, 10]


@given(
    frequency=st.one_of(
        st.floats(0.001, 1.0), st.integers(2, 300), st.sampled_from([0.1, 0.2, 0.3, 0.7, 1 / 3])
    ),
    steps_per_epoch=st.integers(1, 90),
    epochs=st.integers(1, 5),
)
def test_the_arithmetic_agrees_with_the_list_of_all_steps(
    frequency: float, steps_per_epoch: int, epochs: int
) -> None:
    total = steps_per_epoch * epochs
    interval = frequency if frequency > 1 else max(1.0, frequency * steps_per_epoch)
    ends = (math.ceil(number * interval - 1e-6) for number in range(1, int(total / interval) + 1))
    listed = sorted({*ends, total})
    schedule = EvaluationSchedule(frequency, steps_per_epoch=steps_per_epoch, total_steps=total)
    assert [step for step in range(1, total + 1) if schedule.is_due(step)] == listed
    for step in range(total + 1):
        assert schedule.count(step) == sum(one <= step for one in listed)


def test_the_longest_job_that_is_accepted_takes_no_memory_for_its_schedule() -> None:
    tracemalloc.start()
    try:
        schedule = EvaluationSchedule(
            2, steps_per_epoch=50_000, total_steps=2 * FIVE_HUNDRED_MILLION
        )
        assert schedule.count(2 * FIVE_HUNDRED_MILLION) == FIVE_HUNDRED_MILLION
        assert schedule.is_due(2 * FIVE_HUNDRED_MILLION)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
