"""What the fault tests share: the real service behind a proxy, one open flow run, and a cell of the matrix."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.flows.conftest import prefect_api, records
from tests.support.in_process import Service
from tests.system.faults.chain import STEPS, Cell, OpenFlow, Step, World

__all__ = ["prefect_api", "records"]


@pytest.fixture(scope="module")
def world(prefect_api: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A service on sockets whose workers are played, with room for all cells."""
    folder = tmp_path_factory.mktemp("faults")
    room: dict[str, Any] = {"maximum_active_jobs": 1000, "maximum_deployments": 1000}
    with Service(folder / "data", **room) as service:
        service.listen()
        with OpenFlow() as flow, World(service, flow, folder) as made:
            yield made


@pytest.fixture(params=STEPS, ids=lambda step: step.name)
def cell(request: pytest.FixtureRequest, world: World) -> Iterator[Cell]:
    """A step under a fault. Its name is its own, so that no key and no stored result meets another cell's."""
    step: Step = request.param
    made = Cell(world, step, f"cell-{uuid4().hex[:12]}")
    world.waited.clear()
    yield made
    made.heal()
    step.clean(made)
