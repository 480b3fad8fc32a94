"""The record of the training gates: decided again bit by bit."""

import math
from dataclasses import replace

import pytest

from tests.unit.gates.test_training_gates import CHAMPION, JOB, LOSSES, RULES, metrics
from tuneship.gates.training.training_gates import judge_training
from tuneship.gates.training.training_record import TrainingRecord, training_record


@pytest.mark.parametrize("last", [1.0, 5.0, math.nan])
def test_a_record_decides_as_the_gates_did(last: float) -> None:
    found = metrics(validation_loss=[*LOSSES[:-1], last])
    record = TrainingRecord(JOB, found, CHAMPION, RULES)
    read = training_record(record.to_json())
    assert read.to_json() == record.to_json()
    assert str(read.decide()) == str(judge_training(JOB, found, CHAMPION, RULES))


def test_a_record_of_other_rules_is_refused() -> None:
    record = replace(TrainingRecord(JOB, metrics(), None, RULES), rule_version="0")
    with pytest.raises(ValueError, match="rule version '0'"):
        training_record(record.to_json()).decide()


def test_a_text_that_is_no_record_is_refused() -> None:
    for text in ("", "[]", "{}"):
        with pytest.raises(ValueError, match=r"."):
            training_record(text)
