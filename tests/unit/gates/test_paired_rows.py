"""Gates T1, T3, T4, T7 and T9 where the service publishes the losses of validation rows."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.gates.drawn_jobs.worlds import dice
from tests.unit.gates.test_training_gates import CHAMPION, JOB, metrics, state
from tuneship.gates.training.row_losses import Paired, judged, read_row_losses
from tuneship.gates.training.training_gates import (
    TrainingRules,
    TrainingVerdict,
    ValidationMeasure,
    judge_training,
)

ROWS = 400
MODEL = "ft:tiny:champion:1"
NAMED = replace(CHAMPION, model=MODEL)


def rows(
    *, start: float = 2.0, served: float = 1.0, compared: float | None = 1.0, noise: float = 0.1
) -> dict[str, Any]:
    """Losses whose means over the judging rows are nearly these; `noise` is that of a difference."""
    draw = dice(1)
    judge = [number % 2 == 0 for number in range(ROWS)]

    def losses(mean: float) -> list[float]:
        # Each noise is followed by its opposite, so that the mean is exact.
        values: list[float] = []
        for _ in range(ROWS // 4):
            noises = [draw.gauss(0, noise) for _ in range(2)]
            values += [mean + noises[0], mean + noises[1], mean - noises[0], mean - noises[1]]
        return values

    return {
        "rows": list(range(1, ROWS + 1)),
        "judge": judge,
        "trained_on": [False] * ROWS,
        "start": losses(start),
        "served": losses(served),
        "compared": None if compared is None else losses(compared),
        "compared_model": None if compared is None else MODEL,
    }


def judge(
    row_losses: dict[str, Any],
    champion: ValidationMeasure | None = NAMED,
    rules: TrainingRules | None = None,
    **changed: Any,
) -> TrainingVerdict:
    numbers = metrics(**changed) | {"row_losses": row_losses}
    return judge_training(JOB, numbers, champion, rules or TrainingRules())


def note(verdict: TrainingVerdict, gate: str) -> str:
    return next(result.note for result in verdict.gates if result.name.startswith(gate + " "))


def test_the_gain_of_the_judging_rows_must_be_beyond_chance() -> None:
    assert state(judge(rows(start=1.0, served=0.99, noise=0.01)), "T3") == "pass"
    assert state(judge(rows(start=1.0, served=0.99, noise=0.1)), "T3") == "reject"
    assert state(judge(rows(start=1.0, served=0.996, noise=0.001)), "T3") == "reject"
    rules = TrainingRules(min_gain=0.0)
    assert state(judge(rows(start=1.0, served=0.996, noise=0.001), rules=rules), "T3") == "pass"


@pytest.mark.parametrize(
    ("served", "compared", "noise", "expected"),
    [
        (1.0, 1.0, 0.1, "pass"),
        (1.0, 1.0, 0.3, "hold"),
        (1.04, 1.0, 0.1, "reject"),
        (2.04, 2.0, 0.5, "hold"),
        (0.95, 1.0, 0.2, "pass"),
        (3.03, 3.0, 0.2, "pass"),
        (0.069, 0.05, 0.01, "reject"),
        (0.157, 0.138, 0.01, "reject"),
        (0.051, 0.05, 0.01, "pass"),
    ],
)
def test_the_margin_to_the_champion_follows_its_loss(
    served: float, compared: float, noise: float, expected: str
) -> None:
    verdict = judge(rows(served=served, compared=compared, noise=noise))
    assert state(verdict, "T4") == expected, note(verdict, "T4")


def test_a_hold_says_how_many_rows_would_decide() -> None:
    verdict = judge(rows(noise=0.3))
    assert (verdict.decision, verdict.reason) == ("hold", "T4 champion")
    wanted = int(note(verdict, "T4").split("about ")[1].split()[0].replace(",", ""))
    assert ROWS < wanted < 10 * ROWS


def test_another_validation_set_is_no_obstacle_and_another_model_is() -> None:
    elsewhere = replace(NAMED, validation_dataset_id="ds_w", content_sha256="bb")
    assert state(judge(rows(), elsewhere), "T4") == "pass"
    other = replace(elsewhere, model="ft:tiny:other:2")
    assert state(judge(rows(), other), "T4") == "hold"


def test_a_first_model_must_beat_its_base_model() -> None:
    assert state(judge(rows(compared=None), None), "T9") == "pass"
    worse = judge(rows(start=1.0, served=1.1, compared=None), None)
    assert state(worse, "T9") == "reject"
    limited = TrainingRules(max_validation_loss=0.5)
    assert state(judge(rows(compared=None), None, limited), "T9") == "reject"


def test_rows_that_were_trained_on_are_left_out_and_hold_from_one_in_a_hundred_on() -> None:
    few = rows(start=1.0, served=1.0, compared=None)
    for place in (0, 2, 4):
        few["trained_on"][place], few["start"][place] = True, 1000.0
    verdict = judge(few, None)
    assert (state(verdict, "T7"), state(verdict, "T3")) == ("note", "reject")
    few["trained_on"][6] = True
    assert state(judge(few, None), "T7") == "hold"


def test_a_served_loss_that_is_not_finite_rejects() -> None:
    broken = rows()
    broken["served"][17] = None
    verdict = judge(broken)
    assert (verdict.decision, verdict.reason) == ("reject", "T1 finite")
    unmeasured = rows()
    unmeasured["compared"][16] = None
    losses = read_row_losses({"row_losses": unmeasured})
    assert losses is not None
    assert losses.compared is not None
    worse = judged(losses, losses.served, losses.compared)
    assert worse is not None
    assert worse.rows == ROWS // 2 - 1


@pytest.mark.parametrize(
    "changed",
    [
        {"served": [1.0]},
        {"judge": [True]},
        {"start": None},
        {"compared": [1.0]},
        {"served": ["much"] * ROWS},
        {"served": [-1.0] * ROWS},
    ],
)
def test_contradictory_rows_count_as_none(changed: dict[str, Any]) -> None:
    verdict = judge(rows() | changed)
    assert verdict.decision == "pass"
    assert "publishes no losses by row" in note(verdict, "T4")


@pytest.mark.parametrize("judges", [[False] * ROWS, [True] * 7 + [False] * (ROWS - 7)])
def test_few_rows_judge_nothing(judges: list[bool]) -> None:
    verdict = judge(rows() | {"judge": judges})
    assert verdict.decision == "pass"
    assert "fewer than 8 rows judge both models" in note(verdict, "T4")


def test_validation_rows_that_were_all_trained_on_hold() -> None:
    leaked = rows(compared=None) | {"trained_on": [True] * ROWS}
    verdict = judge(leaked, None)
    assert (verdict.decision, verdict.reason) == ("hold", "T7 sanity")


def test_a_champion_without_finite_losses_is_no_obstacle_to_t3() -> None:
    broken = rows() | {"compared": [math.inf] * ROWS}
    verdict = judge(broken)
    assert "over 200 rows" in note(verdict, "T3")
    assert "fewer than 8 rows judge both models" in note(verdict, "T4")


def test_a_paired_difference_is_far_more_exact_than_two_means() -> None:
    hard = [float(number % 50) for number in range(200)]
    easier = [loss - 0.02 - 0.001 * (number % 3) for number, loss in enumerate(hard)]
    gain = Paired.of(list(zip(hard, easier, strict=True)))
    assert gain.mean == pytest.approx(0.021, abs=1e-4)
    assert gain.error < 0.0001
    assert gain.needs(gain.error / 2) == 800
