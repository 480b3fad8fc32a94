"""What `prefect.yaml` declares exists: Prefect's own loader would swallow a broken import until the run."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow

DECLARED: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[2] / "prefect.yaml").read_text()
)["deployments"]


@pytest.mark.parametrize("deployment", DECLARED, ids=lambda one: one["name"])
def test_every_entrypoint_is_a_flow_with_a_form(deployment: dict[str, Any]) -> None:
    module, _, name = deployment["entrypoint"].rpartition(".")
    flow = getattr(import_module(module), name)
    assert isinstance(flow, Flow)
    assert flow.name == deployment["name"]
    assert flow.parameters.properties, "the UI's form would be empty"
    assert set(deployment.get("parameters", {})) <= set(flow.parameters.properties)
