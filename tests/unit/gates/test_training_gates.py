"""The training gates one by one, on curves that differ from a good one in a single way."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tuneship.gates.training.training_gates import (
    FinishedJob,
    TrainingRules,
    TrainingVerdict,
    ValidationMeasure,
    judge_training,
)

RULES = TrainingRules()
JOB = FinishedJob(
    status="completed",
    fine_tuned_model="ft:tiny:m:1",
    base_model="tiny",
    total_steps=20,
    validation_dataset_id="ds_v",
    content_sha256="aa",
    validation_examples=500,
)
CHAMPION = ValidationMeasure("tiny", "ds_v", "aa", best_validation_loss=1.00)
LOSSES = [2.0] * 5 + [1.4] * 5 + [1.1] * 5 + [1.0] * 5


def metrics(**changed: Any) -> dict[str, Any]:
    losses = changed.pop("validation_loss", LOSSES)
    steps = list(range(1, len(losses) + 1))
    return {
        "steps": steps,
        "training_loss": [2.0 - 0.05 * step for step in steps],
        "validation_loss": losses,
        "learning_rate": [1e-3] * len(steps),
        "epochs": [step / 20 for step in steps],
        "accuracy": [0.5] * len(steps),
        "perplexity": [None if loss is None else math.exp(loss) for loss in losses],
        **changed,
    }


def judge(
    job: FinishedJob = JOB,
    champion: ValidationMeasure | None = CHAMPION,
    rules: TrainingRules = RULES,
    **changed: Any,
) -> TrainingVerdict:
    return judge_training(job, metrics(**changed), champion, rules)


def state(verdict: TrainingVerdict, gate: str) -> str:
    return next(result.state for result in verdict.gates if result.name.startswith(gate + " "))


def test_a_good_job_passes_with_every_gate_named_once() -> None:
    verdict = judge()
    assert (verdict.decision, verdict.reason) == ("pass", "none")
    assert [result.name.split()[0] for result in verdict.gates] == [
        f"T{i}" for i in (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11)
    ]


@pytest.mark.parametrize(
    "job",
    [
        replace(JOB, status="failed"),
        replace(JOB, fine_tuned_model=None),
        replace(JOB, total_steps=22),
    ],
)
def test_a_job_that_did_not_end_well_is_rejected(job: FinishedJob) -> None:
    assert (judge(job).decision, judge(job).reason) == ("reject", "T0 terminal")


@pytest.mark.parametrize(("total", "expected"), [(90, "pass"), (100, "pass"), (101, "reject")])
def test_the_last_step_may_miss_by_one_logging_interval(total: int, expected: str) -> None:
    every_20th = {"steps": [20, 40, 60, 80], "training_loss": [2.0, 1.5, 1.2, 1.0]}
    numbers = metrics(validation_loss=[2.0, 1.4, 1.1, 1.0], **every_20th)
    verdict = judge_training(replace(JOB, total_steps=total), numbers, CHAMPION, RULES)
    assert (state(verdict, "T0"), verdict.decision) == (expected, expected)


BROKEN = {
    "nan": {"training_loss": [math.nan] + [1.0] * 19},
    "infinite": {"training_loss": [math.inf] + [1.0] * 19},
    "null": {"training_loss": [None] + [1.0] * 19},
    "absent": {"training_loss": None},
    "unequal": {"training_loss": [1.0]},
    "text": {"training_loss": ["1"] * 20},
    "steps repeat": {"steps": [1, *range(1, 20)]},
    "no steps": {"steps": None},
    "validation infinite": {"validation_loss": [2.0, math.inf, *LOSSES[2:]]},
}


@pytest.mark.parametrize("changed", BROKEN.values(), ids=BROKEN.keys())
def test_metrics_that_cannot_be_trusted_reject(changed: dict[str, Any]) -> None:
    verdict = judge(**changed)
    assert (verdict.decision, verdict.reason) == ("reject", "T1 finite")


def of_200(*broken: int) -> dict[str, Any]:
    losses = [LOSSES[step // 10] for step in range(200)]
    training = [math.nan if step in broken else 1.0 for step in range(1, 201)]
    return {"validation_loss": losses, "training_loss": training}


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ((), "pass"),
        ((50,), "note"),
        ((50, 51), "note"),
        ((50, 51, 52), "reject"),
        ((181,), "reject"),
    ],
)
def test_a_loss_in_a_hundred_may_be_broken_and_none_at_the_end(
    broken: tuple[int, ...], expected: str
) -> None:
    verdict = judge(replace(JOB, total_steps=200), **of_200(*broken))
    assert state(verdict, "T1") == expected
    assert verdict.decision == ("reject" if expected == "reject" else "pass")


@pytest.mark.parametrize(
    ("losses", "expected", "decision"),
    [
        ([None] * 20, "reject", "reject"),
        ([None] * 10 + [1.0] * 10, "hold", "hold"),
        ([2.0] * 10 + [1.0] * 10, "note", "pass"),
        (LOSSES, "pass", "pass"),
    ],
)
def test_two_validation_points_are_noted_and_one_holds(
    losses: list[float | None], expected: str, decision: str
) -> None:
    verdict = judge(validation_loss=losses)
    points = next(gate for gate in verdict.gates if gate.name == "T1 points")
    assert (points.state, verdict.decision) == (expected, decision)


def test_steps_without_an_evaluation_may_hold_nulls() -> None:
    sparse = [LOSSES[i] if i % 5 == 0 else None for i in range(20)]
    assert judge(validation_loss=sparse).decision == "pass"


def test_a_model_that_learned_nothing_is_rejected() -> None:
    flat = [2.0] * 5 + [1.99] * 5 + [1.98] * 5 + [1.97] * 5
    assert judge(validation_loss=flat, champion=None).reason == "T3 learned"
    assert state(judge(validation_loss=flat), "T6") == "pass"


def test_a_worse_model_than_the_champion_is_rejected_and_two_hundredths_are_not_worse() -> None:
    better = replace(CHAMPION, best_validation_loss=0.97)
    assert judge(champion=better).reason == "T4 champion"
    assert judge(champion=replace(CHAMPION, best_validation_loss=0.981)).decision == "pass"


INCOMPARABLE = {
    "other base": replace(CHAMPION, base_model="big"),
    "other content": replace(CHAMPION, validation_dataset_id="ds_w", content_sha256="bb"),
    "no tag": replace(CHAMPION, validation_dataset_id="ds_w", content_sha256=None),
    "no validation set": replace(CHAMPION, validation_dataset_id=None),
    "metrics gone": replace(CHAMPION, best_validation_loss=None),
}


@pytest.mark.parametrize("champion", INCOMPARABLE.values(), ids=INCOMPARABLE.keys())
def test_models_measured_on_different_things_are_never_compared(
    champion: ValidationMeasure,
) -> None:
    verdict = judge(champion=champion)
    assert (verdict.decision, verdict.reason) == ("hold", "T4 champion")


def test_the_same_content_under_another_id_is_comparable() -> None:
    assert judge(champion=replace(CHAMPION, validation_dataset_id="ds_w")).decision == "pass"


def test_a_first_model_has_only_an_absolute_limit() -> None:
    verdict = judge(champion=None)
    states = [state(verdict, gate) for gate in ("T4", "T9")]
    assert (verdict.decision, states) == ("pass", ["not_available"] * 2)
    limited = judge(champion=None, rules=TrainingRules(max_validation_loss=0.9))
    assert (limited.decision, limited.reason) == ("reject", "T9 first model")


RISING = [2.0] * 5 + [1.0] * 5 + [1.02] * 5 + [1.1] * 5


@pytest.mark.parametrize(
    ("share", "expected"),
    [(None, "not_available"), (1.0, "pass"), (0.5, "pass"), (0.49, "hold"), (0.0, "hold")],
)
def test_a_model_that_has_not_learnt_where_answers_end_is_held(
    share: float | None, expected: str
) -> None:
    verdict = judge(replace(JOB, ends_learnt=share))
    assert state(verdict, "T11") == expected
    assert verdict.decision == ("hold" if expected == "hold" else "pass")


def test_a_loss_that_rises_again_warns_where_the_best_checkpoint_serves_and_rejects_elsewhere() -> (
    None
):
    assert state(judge(validation_loss=RISING), "T5") == "warn"
    verdict = judge(validation_loss=RISING, rules=TrainingRules(best_checkpoint_served=False))
    assert (verdict.decision, verdict.reason) == ("reject", "T5 overfit")


def test_a_diverged_last_checkpoint_that_serves_is_rejected_whatever_training_does() -> None:
    served_last = TrainingRules(best_checkpoint_served=False)
    rising = [0.5 + 0.1 * step for step in range(20)]
    verdict = judge(validation_loss=RISING, training_loss=rising, rules=served_last)
    assert (verdict.decision, verdict.reason) == ("reject", "T5 overfit")
    assert state(judge(validation_loss=RISING, training_loss=rising), "T5") == "warn"


def test_a_plateau_is_only_noted() -> None:
    flat = [2.0] * 5 + [1.0] * 5 + [1.001] * 5 + [0.9995] * 5
    verdict = judge(validation_loss=flat)
    assert (verdict.decision, state(verdict, "T6")) == ("pass", "note")


INSANE = {
    "perplexity of another loss": {"perplexity": [9.0] * 20},
    "perplexity zero": {"perplexity": [0.0] * 20},
    "accuracy above one": {"accuracy": [1.5] * 20},
    "loss of a leak": {"validation_loss": [2.0] * 5 + [1.0] * 5 + [0.5] * 5 + [0.005] * 5},
    "loss of zero": {"validation_loss": [2.0] * 5 + [1.0] * 5 + [0.5] * 5 + [0.0] * 5},
}


@pytest.mark.parametrize("changed", INSANE.values(), ids=INSANE.keys())
def test_numbers_that_do_not_fit_together_hold(changed: dict[str, Any]) -> None:
    verdict = judge(champion=None, **changed)
    assert (verdict.decision, verdict.reason) == ("hold", "T7 sanity")


@pytest.mark.parametrize(
    ("duplicates", "expected"), [(None, "pass"), (0, "pass"), (1, "note"), (4, "note"), (5, "hold")]
)
def test_examples_that_stand_in_both_files_hold_from_one_in_a_hundred_on(
    duplicates: int | None, expected: str
) -> None:
    verdict = judge(replace(JOB, duplicates=duplicates))
    assert state(verdict, "T7") == expected
    assert verdict.decision == ("hold" if expected == "hold" else "pass")


@pytest.mark.parametrize("examples", [49, None])
def test_too_few_validation_examples_decide_nothing(examples: int | None) -> None:
    verdict = judge(replace(JOB, validation_examples=examples))
    assert (verdict.decision, verdict.reason) == ("hold", "T8 enough data")


def test_reject_overrules_hold() -> None:
    verdict = judge(
        replace(JOB, validation_examples=1), champion=replace(CHAMPION, best_validation_loss=0.1)
    )
    assert (verdict.decision, verdict.reason) == ("reject", "T4 champion")
