"""`choice` and `loss`: what is asked, the choices that are refused, and the scores that follow from likelihoods."""

from typing import Any

import pytest

from tuneship.contract.evaluations import EvaluationSettings
from tuneship.evaluation.graders import AnswerToScore
from tuneship.evaluation.items import MetadataRefused, read_item
from tuneship.evaluation.likelihoods import Likelihood
from tuneship.evaluation.scoring import (
    Answers,
    HeldOutExample,
    NoAnswer,
    Scoring,
    Stored,
    held_out_examples,
)

SECRET = "Mrs Smith"
CHOICE, LOSS = {"name": "c", "type": "choice"}, {"name": "l", "type": "loss"}
WRITTEN = {"name": "w", "type": "string_check"}
TOO_LONG, GIVEN_UP = NoAnswer("validation_error", 422), NoAnswer("internal_error", 503)
EYE = Likelihood(-1.5, 3)


def settings(*graders: dict[str, Any]) -> EvaluationSettings:
    return EvaluationSettings.model_validate({"graders": [*graders]})


def example(response: str = "eye", **metadata: Any) -> HeldOutExample:
    fields = {"instruction": "Which?", "response": response, "metadata": metadata}
    [made] = held_out_examples([(7, read_item(fields, "instruction"))], settings(WRITTEN))
    return made


def scored(
    candidate: Answers, baseline: Answers | None, *graders: dict[str, Any], **more: Any
) -> Stored:
    wanted = example(choices=["ear", "eye"])
    return Scoring(settings(*graders)).score(wanted, candidate, baseline, **more)


@pytest.mark.parametrize(
    ("graders", "asked"),
    [
        ([WRITTEN], [None]),
        ([CHOICE], ["ear", "eye"]),
        ([CHOICE, LOSS], ["ear", "eye"]),
        ([WRITTEN, LOSS, CHOICE], [None, "ear", "eye"]),
        ([WRITTEN, LOSS], [None, "eye"]),
    ],
)
def test_a_model_is_asked_what_the_graders_read(
    graders: list[dict[str, Any]], asked: list[str | None]
) -> None:
    found = Scoring(settings(*graders)).asked(example(choices=["ear", "eye"]))
    assert found == asked


@pytest.mark.parametrize(
    ("ear", "eye", "score"),
    [
        (-2.0, -1.5, 1.0),
        (-1.0, -1.5, 0.0),
        (-1.5, -1.5, 0.0),
        (-9999.0, -1.5, 1.0),
    ],
)
def test_the_likeliest_choice_is_that_of_the_largest_sum(
    ear: float, eye: float, score: float
) -> None:
    # By the mean of a token, the longer choice would win.
    answers: Answers = {"ear": Likelihood(ear, 100), "eye": Likelihood(eye, 1)}
    found = scored(answers, None, CHOICE)
    assert (found["outcome"], found["candidate"]) == ("scored", {"c": score})


def test_the_loss_is_nats_a_token_and_decides_nothing() -> None:
    ours: Answers = {None: AnswerToScore("eye"), "eye": EYE}
    theirs: Answers = {None: AnswerToScore("no"), "eye": Likelihood(-0.3, 3)}
    found = scored(ours, theirs, WRITTEN, LOSS)
    assert found["outcome"] == "win"
    assert found["candidate"] == {"w": 1.0, "l": 0.5}
    assert found["baseline"]["l"] == pytest.approx(0.1)


def test_a_prompt_that_one_model_refuses_counts_0_and_has_no_loss() -> None:
    refused: Answers = {"ear": EYE, "eye": TOO_LONG}
    found = scored(refused, {"ear": Likelihood(-2.0, 1), "eye": EYE}, CHOICE, LOSS)
    assert found["outcome"] == "loss"
    assert (found["candidate"], found["baseline"]) == ({"c": 0.0}, {"c": 1.0, "l": 0.5})
    assert scored({"ear": TOO_LONG, "eye": EYE}, None, CHOICE)["outcome"] == "too_long"
    assert scored(refused, refused, CHOICE)["outcome"] == "too_long"
    # Another measure must not leave out what the others can score.
    answers: Answers = {None: AnswerToScore("eye"), "eye": TOO_LONG}
    assert scored(answers, answers, WRITTEN, LOSS)["candidate"] == {"w": 1.0}
    assert scored({"ear": EYE, "eye": GIVEN_UP}, None, CHOICE)["outcome"] == "failed"
    stored = scored(refused, None, CHOICE, LOSS, known_baseline={"c": 1.0, "l": 0.5})
    assert (stored["outcome"], stored["candidate"]) == ("loss", {"c": 0.0})


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({}, "missing_field"),
        ({"choices": None}, "missing_field"),
        ({"choices": SECRET}, "invalid_choices"),
        ({"choices": ["eye"]}, "invalid_choices"),
        ({"choices": ["eye", SECRET, SECRET]}, "invalid_choices"),
        ({"choices": ["eye", " "]}, "invalid_choices"),
        ({"choices": ["eye", 5]}, "invalid_choices"),
        ({"choices": ["ear", SECRET]}, "invalid_choices"),
        ({"choices": ["Eye", SECRET]}, "invalid_choices"),
        ({"choices": ["eye", *(str(n) for n in range(32))]}, "invalid_choices"),
    ],
)
def test_choices_that_cannot_be_compared_are_refused_by_their_place(
    metadata: dict[str, Any], code: str
) -> None:
    picked = [(1, example(choices=["eye", "ear"]).item), (7, example(**metadata).item)]
    with pytest.raises(MetadataRefused) as refused:
        held_out_examples(picked, settings(WRITTEN, CHOICE))
    found = refused.value
    assert (found.code, found.field, found.example) == (code, "graders[1]", 1)
    assert SECRET not in found.message


def test_a_reference_that_calls_functions_is_no_choice() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "eye", "tool_calls": [call]},
    ]
    item = read_item({"messages": turns, "metadata": {"choices": ["eye", "ear"]}}, "conversation")
    with pytest.raises(MetadataRefused) as refused:
        held_out_examples([(1, item)], settings(CHOICE))
    assert "calls" in refused.value.message


def test_choices_may_be_json_text_as_tables_have_it() -> None:
    line = {
        "instruction": "a",
        "response": "eye",
        "metadata": '{"choices": ["eye", "ear"]}',
    }
    [made] = held_out_examples([(1, read_item(line, "instruction"))], settings(CHOICE))
    assert Scoring(settings(CHOICE)).asked(made) == ["eye", "ear"]
