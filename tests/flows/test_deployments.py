"""Everything that `prefect.yaml` declares exists; Prefect's own loader would hide a broken import until the run."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyOptions
from prefect.client.schemas.objects import StateType as Type
from prefect.states import Pending, Running

from flows.guard import guard

DECLARED: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[2] / "prefect.yaml").read_text()
)["deployments"]


@pytest.mark.parametrize("deployment", DECLARED, ids=lambda one: one["name"])
def test_every_entrypoint_is_a_flow_with_a_form(deployment: dict[str, Any]) -> None:
    module, _, name = deployment["entrypoint"].rpartition(".")
    flow = getattr(import_module(module), name)
    assert isinstance(flow, Flow)
    assert deployment["name"].startswith(flow.name)
    assert flow.parameters.properties, "the UI's form would be empty"
    given = set(deployment.get("parameters", {}))
    for trigger in deployment.get("triggers", []):
        given |= set(trigger["parameters"])
    assert given <= set(flow.parameters.properties)


def test_a_deployment_that_starts_by_itself_has_all_that_it_needs_or_is_switched_off() -> None:
    for deployment in DECLARED:
        module, _, name = deployment["entrypoint"].rpartition(".")
        needed = set(getattr(import_module(module), name).parameters.required)
        starts = [one["active"] for one in deployment.get("schedules", [])]
        starts += [one["enabled"] for one in deployment.get("triggers", [])]
        assert not any(starts) or needed <= set(deployment.get("parameters", {}))


# Seconds until Prefect frees a dead run's slot: a lease of 5 minutes, checked every 15 s (hard-coded in 3.8.8).
LEASE_S = 300 + 15


def guard_deployment() -> dict[str, Any]:
    return next(one for one in DECLARED if one["name"] == "guard")


@pytest.mark.prefect
@pytest.mark.slow
def test_guards_that_died_with_their_worker_never_keep_the_next_one_from_running(
    prefect_api: None,
) -> None:
    declared = guard_deployment()
    dead = -(-LEASE_S // declared["schedules"][0]["interval"])
    limit = ConcurrencyLimitConfig.model_validate(declared["concurrency_limit"])
    with get_client(sync_client=True) as client:
        deployment_id = client.create_deployment(
            flow_id=client.create_flow(guard),
            name="limited",
            concurrency_limit=limit.limit,
            concurrency_options=ConcurrencyOptions(collision_strategy=limit.collision_strategy),
        )
        for _ in range(dead):
            run = client.create_flow_run_from_deployment(deployment_id)
            assert client.set_flow_run_state(run.id, Pending()).state.type == Type.PENDING
            assert client.set_flow_run_state(run.id, Running()).state.type == Type.RUNNING
        run = client.create_flow_run_from_deployment(deployment_id)
        assert client.set_flow_run_state(run.id, Pending()).state.type == Type.PENDING


def test_a_release_that_finds_no_slot_waits_and_is_not_cancelled() -> None:
    limited = [one for one in DECLARED if "concurrency_limit" in one and one["name"] != "guard"]
    assert len(limited) == 3
    for one in limited:
        assert one["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
