"""The speed of a training, measured by a clock that the test moves."""

from tuneship.training.speed import RECENT_STEPS, TrainingSpeed


class Clock:
    """A clock that shows the seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(pace: TrainingSpeed, clock: Clock, seconds: float, tokens: int) -> None:
    pace.begin_step()
    clock.now += seconds
    pace.end_step(tokens)


def test_tokens_count_while_learning_and_steps_with_what_lies_between() -> None:
    clock = Clock()
    pace = TrainingSpeed(clock)
    step(pace, clock, 2.0, 100)
    # A measurement takes this long and must not count.
    clock.now += 4.0
    step(pace, clock, 2.0, 300)
    assert pace.due_report() == {"tokens_per_second": 100.0, "seconds_per_step": 4.0}


def test_a_machine_that_gets_slower_shows_in_the_tokens() -> None:
    clock = Clock()
    pace = TrainingSpeed(clock)
    for _ in range(RECENT_STEPS):
        step(pace, clock, 1.0, 100)
    for _ in range(RECENT_STEPS):
        step(pace, clock, 4.0, 100)
    assert pace.due_report() == {"tokens_per_second": 25.0, "seconds_per_step": 2.5}


def test_it_is_reported_at_the_first_step_and_then_once_a_second() -> None:
    clock = Clock()
    pace = TrainingSpeed(clock)
    reported: list[int] = []
    for number in range(10):
        step(pace, clock, 0.25, 1)
        if pace.due_report():
            reported.append(number)
    assert reported == [0, 4, 8]
