"""The plan's defaults are those of the design, and a plan that makes no sense is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.unit.gates.rollouts import plan_with
from tuneship.contract.metrics import MetricSeries, TokenUsageSeries
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.readings import choose_gates, limits_of, log_threshold
from tuneship.gates.statistics.evidence import Limits

COUNTS_EMPTY = MetricSeries(token_usage=TokenUsageSeries(empty_count=[0]))


def test_the_defaults_are_those_of_the_design() -> None:
    plan = plan_with()
    assert plan.steps == [5, 25, 50, 75, 100]
    assert (plan.min_looks_per_step, plan.max_looks_per_step, plan.max_looks) == (5, 90, 240)
    assert (plan.stale_looks, plan.missing_looks, plan.bake_looks) == (3, 10, 30)
    assert limits_of(plan, "error") == Limits(1.5, 0.01, 0.02)
    assert limits_of(plan, "slow") == Limits(1.5, 0.075, 0.10, (5, 8))
    assert limits_of(plan, "very_slow") == Limits(2.0, 0.02, 0.04)
    assert limits_of(plan, "empty") == Limits(1.5, 0.01, 0.02)
    assert limits_of(plan, "length") is None


def test_one_changed_limit_leaves_the_others_at_their_defaults() -> None:
    plan = plan_with(latency_gates={"slow": {"ratio": 3.0}}, quality_gates={"empty": {"ok": 0.1}})
    assert limits_of(plan, "slow") == Limits(3.0, 0.075, 0.10, (5, 8))
    assert limits_of(plan, "empty") == Limits(1.5, 0.01, 0.1)


REFUSED = {
    "unknown field": {"step": [5, 100]},
    "unknown inner field": {"error_gate": {"slo": 0.1}},
    "unknown gate": {"quality_gates": {"speed": None}},
    "steps fall": {"steps": [50, 25, 100]},
    "steps repeat": {"steps": [5, 5, 100]},
    "steps end early": {"steps": [5, 50]},
    "steps start at zero": {"steps": [0, 100]},
    "nothing is compared": {"steps": [100]},
    "text for a number": {"max_looks": "240"},
    "boolean for a number": {"bake_looks": True},
    "fraction for a count": {"bake_looks": 2.5},
    "interval": {"interval": "1 minute"},
    "interval too long": {"interval": "2d"},
    "not finite": {"look_every_seconds": float("inf")},
    "no time between looks": {"look_every_seconds": 0},
    "minimum above maximum": {"min_looks_per_step": 9, "max_looks_per_step": 8},
    "stale above missing": {"stale_looks": 11},
    "policy": {"on_inconclusive": "promote"},
    "limit above a half": {"error_gate": {"harm": 0.6}},
    "no endpoint": {"endpoint_id": None},
    "one deployment twice": {"candidate_deployment_id": "dep_b"},
    "traffic without prompts": {"traffic": {"requests_per_second": 1.0}},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED.keys())
def test_a_plan_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        plan_with(**fields)


def test_every_field_tells_the_reader_of_the_form_what_it_means() -> None:
    schema = CanaryPlan.model_json_schema()
    models = [schema, *schema["$defs"].values()]
    assert all("description" in field for model in models for field in model["properties"].values())


def test_a_plan_survives_json_and_its_digest_tells_plans_apart() -> None:
    plan = plan_with(steps=[10, 100], traffic={"prompts": "p", "requests_per_second": 2})
    assert CanaryPlan.model_validate_json(plan.model_dump_json()) == plan
    assert CanaryPlan.model_validate(plan.model_dump()).digest() == plan.digest()
    assert plan.digest() != plan_with().digest()


class LaterPlan(CanaryPlan):
    """The plan of a later release that has one more field."""

    patience: int = 5


def test_an_upgrade_between_a_kill_and_the_next_run_leaves_the_plan_the_same() -> None:
    fields = plan_with(steps=[10, 100]).model_dump(exclude_unset=True)
    later = LaterPlan.model_validate(fields)
    assert later.digest() == CanaryPlan.model_validate(fields).digest()
    assert later.digest() != LaterPlan.model_validate(fields | {"patience": 6}).digest()


def test_alpha_is_shared_by_the_gates_that_test() -> None:
    plan = plan_with(latency_gates={"slow": None}, error_gate={"ok": None})
    gates = choose_gates(plan, COUNTS_EMPTY)
    assert {gate.name: gate.state for gate in gates if gate.state != "disabled"} == {
        "error": "not_evaluated",
        "very_slow": "active",
        "typical": "not_available",
        "empty": "active",
        "short": "not_available",
        "long": "not_available",
        "abandoned": "not_available",
        "refused": "not_available",
    }
    assert log_threshold(plan, gates, "empty") == pytest.approx(3.6888794541139363)


@pytest.mark.parametrize(
    ("answer", "driver", "source", "state"),
    [
        (COUNTS_EMPTY, True, "series", "active"),
        (MetricSeries(token_usage=TokenUsageSeries(output=[0])), True, "probes", "active"),
        (MetricSeries(), False, "probes", "not_available"),
        (None, True, "probes", "active"),
    ],
)
def test_the_source_of_empty_is_the_service_then_the_driver(
    answer: MetricSeries | None, driver: bool, source: str, state: str
) -> None:
    traffic = {"prompts": "p", "requests_per_second": 1} if driver else None
    gate = next(
        gate for gate in choose_gates(plan_with(traffic=traffic), answer) if gate.name == "empty"
    )
    assert (gate.source, gate.state) == (source, state)
