"""A rollout is judged to its end, and replayed, by the formula of the release that began it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gates.rollouts import RUNNING, Rollout, Steady, plan_with
from tuneship.gates.canary import judge, replay
from tuneship.gates.formula import FORMULA_VERSION, formula_of
from tuneship.gates.metrics_reader import read_series
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Look, RolloutRecord, Verdict, from_lines
from tuneship.gates.series import RolloutSeries

RECORDS = Path(__file__).parent / "records"


def of_version_1(name: str) -> tuple[CanaryPlan, RolloutSeries, RolloutRecord]:
    """Load a rollout that the release before formula version 2 decided and recorded."""
    stored: dict[str, Any] = json.loads((RECORDS / f"version_1_{name}.json").read_text())
    plan = CanaryPlan.recorded(stored["plan"])
    series = read_series(stored["baseline_metrics"], stored["candidate_metrics"], plan.interval)
    return plan, series, from_lines(json.dumps(line) for line in stored["record"])


@pytest.mark.parametrize("name", ["shrinks", "late"])
def test_a_record_of_version_1_is_decided_again_bit_by_bit(name: str) -> None:
    plan, series, record = of_version_1(name)
    assert {look.formula_version for look in record.looks} == {"1"}
    assert replay(record, series, plan) == record.looks


def test_the_formula_of_today_would_have_held_what_version_1_promoted() -> None:
    """The answers shrank to a fifth. The record shows it, but is not judged by the later formula."""
    plan, series, record = of_version_1("shrinks")
    at = next(i for i, fact in enumerate(record.facts) if _promotes(fact))
    promoted, before = record.facts[at], RolloutRecord(record.facts[:at])
    assert isinstance(promoted, Look)
    cut = replace(series, buckets=series.until(promoted.horizon))
    assert judge(cut, RUNNING, RUNNING, plan, before).verdict is Verdict.PROMOTE
    today = replace(before.begun, formula_version=FORMULA_VERSION)
    again = judge(cut, RUNNING, RUNNING, plan, RolloutRecord((today, *before.facts[1:])))
    assert (again.verdict, again.reasons) == (Verdict.HOLD, ("quality",))


def _promotes(fact: object) -> bool:
    return isinstance(fact, Look) and fact.verdict is Verdict.PROMOTE


def test_a_new_roll_out_is_judged_by_the_formula_of_its_first_look() -> None:
    rollout = Rollout(plan_with(), Steady()).begin()
    assert str(formula_of(rollout.record)) == FORMULA_VERSION
    assert rollout.look().formula_version == FORMULA_VERSION
    assert str(formula_of(rollout.record)) == FORMULA_VERSION


def test_a_record_of_a_later_release_is_not_judged() -> None:
    rollout = Rollout(plan_with(), Steady()).begin()
    later = replace(rollout.record.begun, formula_version="99")
    rollout.record = RolloutRecord((later, *rollout.record.facts[1:]))
    with pytest.raises(ValueError, match="cannot judge by formula version '99'"):
        rollout.look()
