"""The record of the training gates: decided again bit by bit."""

import json
import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.unit.gates.test_training_gates import CHAMPION, JOB, LOSSES, RULES, metrics
from tuneship.gates.training.training_gates import judge_training
from tuneship.gates.training.training_record import TrainingRecord, training_record


@pytest.mark.parametrize("last", [1.0, 5.0, math.nan, math.inf, -math.inf])
def test_a_record_decides_as_the_gates_did(last: float) -> None:
    found = metrics(validation_loss=[*LOSSES[:-1], last])
    record = TrainingRecord(JOB, found, CHAMPION, RULES)
    read = training_record(record.to_json())
    assert read.to_json() == record.to_json()
    assert str(read.decide()) == str(judge_training(JOB, found, CHAMPION, RULES))


def test_a_record_keeps_every_number_bit_by_bit() -> None:
    found = metrics(validation_loss=[*LOSSES[:-1], math.inf]) | {"more": [math.nan, -0.0, 1, True]}
    champion = replace(CHAMPION, best_validation_loss=-math.inf)
    record = TrainingRecord(JOB, found, champion, RULES)
    read = training_record(record.to_json())
    assert str(sorted(read.metrics.items())) == str(sorted(found.items()))
    assert replace(read, metrics={}) == replace(record, metrics={})
    assert read.to_json() == record.to_json()
    assert str(read.decide()) == str(record.decide())


def test_a_record_writes_the_times_of_metrics_as_the_service_does() -> None:
    record = TrainingRecord(JOB, {"at": datetime(2026, 3, 1, tzinfo=UTC)}, None, RULES)
    assert training_record(record.to_json()).metrics == {"at": "2026-03-01T00:00:00Z"}


def test_a_record_of_other_rules_is_refused() -> None:
    record = replace(TrainingRecord(JOB, metrics(), None, RULES), rule_version="0")
    with pytest.raises(ValueError, match="rule version '0'"):
        training_record(record.to_json()).decide()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "it cannot be read (dataclass_type)"),
        ("{}", "job cannot be read (missing)"),
    ],
)
def test_a_text_that_is_no_record_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        training_record(text)
    assert str(refused.value) == message


def test_a_limit_that_is_not_finite_is_refused_by_its_place() -> None:
    fields = json.loads(TrainingRecord(JOB, metrics(), None, RULES).to_json())
    for number in (math.inf, -math.inf, math.nan):
        fields["rules"]["champion_margin"] = number
        with pytest.raises(ValueError) as refused:
            training_record(json.dumps(fields))
        assert str(refused.value) == "rules.champion_margin cannot be read (finite_number)"
