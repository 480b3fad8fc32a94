"""Jobs with numbers that nobody expects: each is judged, and the gate that decides says why."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tuneship.gates.training.divergence import DivergenceWatch, watch_training
from tuneship.gates.training.training_gates import (
    FinishedJob,
    TrainingRules,
    ValidationMeasure,
    judge_training,
)

STEPS = 20
ROWS = 40
JOB = FinishedJob("completed", "ft:t:m:1", "tiny", STEPS, "ds_v", "aa", 400)
CHAMPION = ValidationMeasure("tiny", "ds_v", "aa", 1.0, "ft:tiny:champion:1")
ELSEWHERE = replace(CHAMPION, validation_dataset_id="ds_w", content_sha256="bb")
FALLING = [2.0 - 0.05 * step for step in range(STEPS)]
HUGE = 1e308
BEYOND_FLOAT = 10**400


def metrics(
    validation: list[Any], training: list[Any] | None = None, rows: Any = None
) -> dict[str, Any]:
    count = len(validation)
    return {
        "steps": list(range(1, count + 1)),
        "training_loss": [1.0] * count if training is None else training,
        "validation_loss": validation,
        "row_losses": rows,
    }


def rows(start: Any, served: Any, compared: Any = None, count: int = ROWS) -> dict[str, Any]:
    """Losses by row; a number is the loss of each."""
    columns = [[one] * count if isinstance(one, int | float) else one for one in (start, served)]
    return {
        "rows": list(range(1, count + 1)),
        "judge": [row % 2 == 0 for row in range(count)],
        "trained_on": [False] * count,
        "start": columns[0],
        "served": columns[1],
        "compared": None if compared is None else [compared] * count,
        "compared_model": None if compared is None else CHAMPION.model,
    }


@pytest.mark.parametrize(
    ("numbers", "champion", "reason", "words"),
    [
        (metrics([1.0] * STEPS), CHAMPION, "T1 points", "equal ones in a row count once"),
        (metrics([1.0] * STEPS, rows=rows(1.0, 1.0, 1.0)), CHAMPION, "T3 learned", "over 20 rows"),
        (metrics([1.0]), None, "T0 terminal", "of 20"),
        (metrics([]), None, "T0 terminal", "of 20"),
        (metrics([None] * STEPS), CHAMPION, "T1 points", "never measured"),
        (metrics([math.inf] * STEPS), CHAMPION, "T1 finite", "not finite"),
        (metrics(FALLING, rows=rows(2.0, 1.0, count=1)), ELSEWHERE, "T4 champion", "comparable"),
        (metrics([0.0] * STEPS, [0.0] * STEPS, rows(0.0, 0.0, 0.0)), CHAMPION, "T3 learned", "+0"),
        (
            metrics([1.0] + [0.0] * 19, rows=rows(1.0, 0.0, 0.0)),
            CHAMPION,
            "T7 sanity",
            "trained on",
        ),
        (metrics(FALLING, rows=rows(2.0, [1e-5, 0.0] * 20, 0.0)), CHAMPION, "T4 champion", "worse"),
        (metrics(FALLING, rows=rows(math.inf, 1.0, 1.0)), CHAMPION, "none", ""),
        (metrics(FALLING, rows=rows(2.0, math.inf, 1.0)), CHAMPION, "T1 finite", "validation row"),
        (metrics(FALLING, rows=rows(2.0, 1.0, math.inf)), CHAMPION, "T4 champion", "fewer than 8"),
        (metrics(FALLING, rows=rows(2.0, 1.0, 1.0)), ELSEWHERE, "none", ""),
        (metrics(FALLING), ELSEWHERE, "T4 champion", "not comparable"),
        (metrics(FALLING, rows="text"), ELSEWHERE, "T4 champion", "not comparable"),
        (metrics([HUGE, 1.5 * HUGE] * 10, [HUGE] * STEPS), CHAMPION, "T3 learned", "1e+308"),
        (metrics(FALLING, [BEYOND_FLOAT] * STEPS), CHAMPION, "T1 finite", "too large"),
        (metrics(FALLING, rows=rows(BEYOND_FLOAT, 1.0)), None, "none", ""),
    ],
)
def test_an_odd_job_ends_with_a_reason(
    numbers: dict[str, Any], champion: ValidationMeasure | None, reason: str, words: str
) -> None:
    verdict = judge_training(JOB, numbers, champion, TrainingRules())
    assert verdict.reason == reason
    assert words in next((gate.note for gate in verdict.gates if gate.name == reason), "")


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([0.0] * 200, False),
        ([1.0] * 200, False),
        ([0.0, HUGE] * 100, False),
        ([math.inf] * 200, True),
        ([BEYOND_FLOAT] * 200, True),
    ],
)
def test_odd_losses_are_watched(losses: list[float], ends: bool) -> None:
    watch, found = DivergenceWatch(), None
    for step in range(10, 201, 10):
        watch, gate = watch_training(watch, metrics([None] * step, losses[:step]), 0)
        found = found or gate
    assert (found is not None) == ends
