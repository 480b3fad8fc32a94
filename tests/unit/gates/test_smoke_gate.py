"""The smoke test's gate: faults that only the candidate has, and time per token."""

from dataclasses import replace

import pytest

from tuneship.gates.smoke_test import SmokeAnswer, judge_smoke

GOOD = SmokeAnswer(200, "Diseases of the eye", "stop", output_tokens=10, latency_ms=100.0)


BAD = replace(GOOD, status=500)
UNUSABLE = [
    BAD,
    replace(GOOD, completion="  "),
    replace(GOOD, finish_reason="tired"),
    replace(GOOD, completion="a b c d " * 6),
]


def answers(*bad: int, of: int = 20) -> list[SmokeAnswer]:
    return [BAD if number in bad else GOOD for number in range(of)]


def test_sensible_answers_pass() -> None:
    assert judge_smoke(answers(), answers()).state == "pass"


@pytest.mark.parametrize("bad", UNUSABLE)
def test_four_faults_of_the_candidate_alone_reject_and_three_do_not(bad: SmokeAnswer) -> None:
    assert judge_smoke(answers(), [*[bad] * 3, *[GOOD] * 17]).state == "pass"
    judged = judge_smoke(answers(), [*[bad] * 4, *[GOOD] * 16])
    assert (judged.state, judged.value, judged.limit) == ("reject", 4, 3)
    assert str(bad.problem) in judged.note


def test_the_baseline_has_faults_of_its_own() -> None:
    both = answers(0, 1, 2, 3, 4, 5)
    assert judge_smoke(both, both).state == "pass", "the prompts are at fault"
    ours = answers(0, 1, 2, 3)
    assert judge_smoke(answers(4), ours).state == "reject"
    assert judge_smoke(answers(4, 5), ours).state == "pass"
    assert judge_smoke(answers(4, 5), answers(0, 1, 2, 3, 6, 7)).state == "reject"


def test_few_prompts_must_all_fail() -> None:
    assert judge_smoke(answers(of=3), answers(0, 1, of=3)).state == "pass"
    assert judge_smoke(answers(of=3), answers(0, 1, 2, of=3)).state == "reject"
    assert judge_smoke([], answers(0, 1, 2, of=3)).state == "reject"


def test_prompts_that_nobody_answers_decide_nothing() -> None:
    every = answers(*range(20))
    assert judge_smoke(every, every).state == "hold"


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


def test_a_short_answer_that_comes_sooner_is_not_slow() -> None:
    """Its few tokens bear the fixed costs of a request."""
    baseline = [SmokeAnswer(200, "a long answer", "length", 64, 300.0)] * 20
    candidate = [SmokeAnswer(200, "ward 2", "stop", 3, 60.0)] * 20
    assert judge_smoke(baseline, candidate).state == "pass"
    slow = [SmokeAnswer(200, "ward 2", "stop", 3, 1000.0)] * 20
    assert judge_smoke(baseline, slow).state == "reject"
