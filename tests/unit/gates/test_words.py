"""Every reason, gate and gate state has its words; a new one without words fails here."""

import ast
import inspect
from dataclasses import replace
from typing import get_args

import pytest

from tests.unit.gates.rollouts import Rollout, Served, Steady, plan_with
from tuneship.gates import canary, rules, thresholds
from tuneship.gates.gate_types import GateReading, GateState
from tuneship.gates.kinds import GATES
from tuneship.gates.outlook import DOUBLING, Forecast, Today, Unprovable
from tuneship.gates.record import Begun, Probed, RolloutRecord, SplitConfirmed
from tuneship.gates.reports import words
from tuneship.gates.reports.words import OF_A_GATE, REASONS, gates_in_words, in_words, look_in_words

WHO_HOLDS = ("_hold_reasons", "_warnings")
WORDS_IN = ("reason", "holding")
# Words that are not reasons: states of gates, answers, and `none`.
NO_REASONS = {*get_args(GateState), "promote", "timeout", "pause", "none"}


def reasons_of_the_rules() -> set[str]:
    """Collect the words of every `Ruling`, of what becomes its reason, and of the pairs of reasons to hold."""
    tree = ast.parse(inspect.getsource(rules) + inspect.getsource(canary))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Ruling":
            found |= {text for argument in node.args[1:] for text in strings(argument)}
            found |= {text for keyword in node.keywords for text in strings(keyword.value)}
        if isinstance(node, ast.FunctionDef) and node.name in WHO_HOLDS:
            pairs = [one for one in ast.walk(node) if isinstance(one, ast.Tuple) and one.elts]
            found |= {text for pair in pairs for text in strings(pair.elts[0])}
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in WORDS_IN:
            found |= set(strings(node.value))
    return {text for text in found if is_word(text)} - set(GATES) - NO_REASONS


def strings(node: ast.AST) -> list[str]:
    return [
        one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]


def is_word(text: str) -> bool:
    return text.rstrip(":").replace("_", "").isalpha() and text.islower()


def test_the_rules_words_are_found() -> None:
    found = reasons_of_the_rules()
    assert {"early_warning:", "split_mismatch", "circuit_breaker", "human_rejected"} <= found
    assert {"output_tokens", "dwell", "settling", "approval", "quality", "max_looks"} <= found


@pytest.mark.parametrize("reason", sorted(reasons_of_the_rules()))
def test_every_reason_of_the_rules_has_its_words(reason: str) -> None:
    known = OF_A_GATE if reason.endswith(":") else REASONS
    assert known[reason.rstrip(":")]
    assert in_words(f"{reason}name" if reason.endswith(":") else reason) != reason


@pytest.mark.parametrize("kind", GATES.values(), ids=lambda kind: kind.name)
def test_every_gate_says_what_it_saw_in_every_state(kind: object) -> None:
    name = getattr(kind, "name", "")
    assert getattr(kind, "reason", "") in REASONS
    for state in get_args(GateState):
        reading = GateReading(
            name=name,
            state=state,
            candidate_requests=200,
            candidate_bad=3,
            baseline_requests=100,
            baseline_bad=1,
        )
        (sentence,) = gates_in_words([reading])
        assert words.BAD[name] in sentence
        assert "3 of 200 (1.50 %)" in sentence
        assert sentence.endswith(words.STATES[state])


def test_plain_thresholds_end_with_reasons_that_have_words() -> None:
    source = inspect.getsource(thresholds)
    assert {"error_rate", "latency", "quality"} <= set(REASONS)
    assert source.count('"error_rate"') == 1, "a new threshold's reason belongs into the line above"


def test_a_word_that_is_not_known_stays_as_it_is() -> None:
    assert in_words("phi_echo") == "phi_echo"
    assert in_words("new_kind:error") == "new_kind:error"


def test_a_look_tells_of_requests_that_hang_and_of_its_warnings() -> None:
    look = Rollout(plan_with(), Steady()).begin().look()
    sentences = look_in_words(replace(look, hanging_candidate=(2, 1), warnings=("output_tokens",)))
    assert (
        "3 requests of the candidate and 0 of the baseline had been open for too long" in sentences
    )
    assert any(one.startswith("warning: the candidate's answers") for one in sentences)


def test_requests_that_nobody_answered_are_shared_by_weight() -> None:
    record = RolloutRecord(
        (
            SplitConfirmed(10),
            Probed(5, 45, unanswered=10, candidate_abandoned=1),
            SplitConfirmed(50),
            Probed(20, 20, unanswered=2),
        )
    )
    counts = words.driven(record)
    assert (counts["unanswered_candidate"], counts["unanswered_baseline"]) == (2.0, 10.0)
    sentences = words.driver_in_words(record)
    assert sentences is not None
    assert "25 to the candidate, 65 to the baseline; 1 and 0 broke off in the answer" in sentences
    assert "12 ended before anybody said who served them (by weight 2 of" in sentences


def test_an_arm_without_requests_is_said_to_have_none() -> None:
    last = Rollout(plan_with(), lambda _bucket, _weight: (Served(100), Served())).begin().look()
    assert any(
        "none of the candidate's requests failed" in one for one in gates_in_words(last.gates)
    )


def forecast_of(today: Today | None, forecast: Forecast | None) -> list[str]:
    plan = plan_with(bake_weight=95).model_dump(mode="json")
    return words.forecast_in_words(
        Begun("r", "cep_1", plan, "", (), today=today, forecast=forecast)
    )


def test_a_forecast_says_how_long_a_promotion_and_a_rollback_take() -> None:
    assert forecast_of(None, None) == []
    promoted, doubled, missing, cannot = forecast_of(
        Today(3.25, by_hour=(3.25, 600.0)),
        Forecast(
            promote_minutes=20.0,
            promote_minutes_most=200.0,
            doubling_minutes=1.5,
            unprovable=(
                Unprovable("slow", "too few"),
                Unprovable("long", "too few"),
                Unprovable(DOUBLING, "too few errors"),
            ),
            drawn=100,
            promoted=100,
        ),
    )
    assert promoted.startswith(
        "at 3.2 requests a minute now and 600 requests a minute in the busiest hour of a day"
        " about 20 minutes to promote an equal candidate (nine of ten within 3.3 hours), then"
    )
    assert doubled == "a doubling of errors is found within 90 seconds"
    assert missing == "cannot prove slow, long: too few requests within the plan's checks"
    assert cannot == "cannot promise to find twice the errors: too few errors"


def test_a_forecast_says_what_becomes_of_candidates_that_are_not_promoted() -> None:
    some = Forecast(promote_minutes=20.0, drawn=10, promoted=7, slowest_minutes=60.0, undecided=1)
    (sentence,) = forecast_of(Today(20.0), some)
    assert "(7 of 10 within 60 minutes; 1 ends undecided; 2 end rolled back)" in sentence
    none = forecast_of(Today(20.0), replace(some, promote_minutes=None))
    assert none == [
        (
            "at 20 requests a minute an equal candidate is not expected to be promoted"
            " (7 of 10 within 60 minutes; 1 ends undecided; 2 end rolled back)"
        )
    ]
