"""The training gates one by one, on curves that differ from a good one in a single way."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tuneship.gates.training_gates import (
    DivergenceWatch,
    FinishedJob,
    SmokeAnswer,
    TrainingRules,
    TrainingVerdict,
    ValidationMeasure,
    judge_smoke,
    judge_training,
    watch_training,
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
        f"T{i}" for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11)
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


BROKEN = {
    "nan": {"training_loss": [math.nan] + [1.0] * 19},
    "infinite": {"training_loss": [math.inf] + [1.0] * 19},
    "null": {"training_loss": [None] + [1.0] * 19},
    "absent": {"training_loss": None},
    "unequal": {"training_loss": [1.0]},
    "text": {"training_loss": ["1"] * 20},
    "steps repeat": {"steps": [1, *range(1, 20)]},
    "no steps": {"steps": None},
    "two validation points": {"validation_loss": [2.0] * 10 + [1.0] * 10},
    "validation never measured": {"validation_loss": [None] * 20},
    "validation infinite": {"validation_loss": [2.0, math.inf, *LOSSES[2:]]},
}


@pytest.mark.parametrize("changed", BROKEN.values(), ids=BROKEN.keys())
def test_metrics_that_cannot_be_trusted_reject(changed: dict[str, Any]) -> None:
    verdict = judge(**changed)
    assert (verdict.decision, verdict.reason) == ("reject", "T1 finite")


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
    assert (verdict.decision, state(verdict, "T4"), state(verdict, "T9")) == (
        "pass",
        "not_available",
        "disabled",
    )
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


def test_examples_that_stand_in_both_files_hold() -> None:
    assert judge(replace(JOB, duplicates=3)).reason == "T7 sanity"


@pytest.mark.parametrize("examples", [49, None])
def test_too_few_validation_examples_decide_nothing(examples: int | None) -> None:
    verdict = judge(replace(JOB, validation_examples=examples))
    assert (verdict.decision, verdict.reason) == ("hold", "T8 enough data")


def test_reject_overrules_hold() -> None:
    verdict = judge(
        replace(JOB, validation_examples=1), champion=replace(CHAMPION, best_validation_loss=0.1)
    )
    assert (verdict.decision, verdict.reason) == ("reject", "T4 champion")


# Gates on a running job.


def polls(*curves: dict[str, Any], warmup: int = 0) -> list[str | None]:
    watch, names = DivergenceWatch(), list[str | None]()
    for curve in curves:
        watch, gate = watch_training(watch, curve, warmup)
        names.append(gate.name if gate else None)
    return names


def curve(losses: list[float | None]) -> dict[str, Any]:
    return {"steps": list(range(1, len(losses) + 1)), "training_loss": losses}


def test_a_loss_that_is_not_finite_cancels_at_the_second_poll() -> None:
    assert polls(curve([1.0]), curve([1.0, math.nan]), curve([1.0, math.nan])) == [
        None,
        None,
        "T1 finite",
    ]


def test_a_single_bad_poll_is_forgiven() -> None:
    good, bad = curve([1.0]), curve([None])
    assert polls(bad, good, bad, good) == [None] * 4


def test_a_diverging_loss_cancels_at_the_third_poll_that_brings_steps() -> None:
    up: list[float | None] = [1.0] * 10 + [9.0] * 10
    worse = [curve([*up, *[9.0] * more]) for more in (0, 1, 1, 2)]
    assert polls(*worse) == [None, None, None, "T2 divergence"]


def test_the_noise_of_a_small_loss_is_no_divergence() -> None:
    tuned: list[float | None] = [6.0] * 5 + [0.07] * 40
    noisy = [curve([*tuned, *[0.2] * more]) for more in (8, 10, 12, 14)]
    assert polls(*noisy) == [None, None, None, None]


def test_a_loss_that_comes_back_from_low_is_a_divergence() -> None:
    tuned: list[float | None] = [6.0] * 5 + [0.07] * 40
    lost = [curve([*tuned, *[5.0] * more]) for more in (8, 10, 12, 14)]
    assert polls(*lost)[-1] == "T2 divergence"


def test_a_warm_up_that_starts_high_is_no_divergence() -> None:
    losses: list[float | None] = [9.0, 8.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.4, 1.3]
    assert polls(*[curve(losses[:n]) for n in range(3, 10)]) == [None] * 7
    assert polls(*[curve([1.0, 2.0][:n]) for n in (1, 2)], warmup=5) == [None, None]


def test_an_empty_record_is_no_evidence() -> None:
    assert polls(curve([]), curve([])) == [None, None]


# The smoke test.

GOOD = SmokeAnswer(200, "Diseases of the eye", "stop", output_tokens=10, latency_ms=100.0)


def test_ten_sensible_answers_pass() -> None:
    assert judge_smoke([GOOD] * 10, [GOOD] * 10).state == "pass"


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, status=500),
        replace(GOOD, completion="  "),
        replace(GOOD, finish_reason="tired"),
        replace(GOOD, completion="a b c d " * 6),
    ],
)
def test_one_answer_that_is_not_sensible_rejects(bad: SmokeAnswer) -> None:
    assert judge_smoke([GOOD] * 10, [*[GOOD] * 9, bad]).state == "reject"


@pytest.mark.parametrize(
    ("slow", "state"), [(1, "pass"), (5, "pass"), (6, "reject"), (10, "reject")]
)
def test_a_model_slower_on_most_prompts_is_slower_and_a_stall_is_not(slow: int, state: str) -> None:
    stalled = replace(GOOD, latency_ms=301.0)
    answers = [*[stalled] * slow, *[GOOD] * (10 - slow)]
    judged = judge_smoke([GOOD] * 10, answers)
    assert (judged.state, judged.limit) == (state, 3.0)


def test_a_prompt_that_is_slow_for_both_says_nothing() -> None:
    every = [replace(GOOD, latency_ms=100.0 * n) for n in range(1, 11)]
    judged = judge_smoke(every, [replace(one, latency_ms=2.9 * one.latency_ms) for one in every])
    assert (judged.state, round(judged.value or 0, 6)) == ("pass", 2.9)


def test_times_of_a_few_prompts_say_nothing_of_who_is_slower() -> None:
    slow = replace(GOOD, latency_ms=9000.0)
    assert judge_smoke([GOOD] * 4, [slow] * 4).state == "pass"
    unknown = replace(slow, output_tokens=0)
    assert judge_smoke([GOOD] * 10, [*[slow] * 4, *[unknown] * 6]).state == "pass"
    assert judge_smoke([replace(GOOD, status=500)] * 10, [slow] * 10).state == "pass"


def test_no_answers_decide_nothing() -> None:
    assert judge_smoke([GOOD], []).state == "hold"
    assert judge_smoke([], [GOOD]).state == "pass"
