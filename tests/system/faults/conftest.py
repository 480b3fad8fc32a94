"""The fault tests share these fixtures: the real service behind a proxy, an open flow run, and a case of the matrix."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.flows.conftest import records
from tests.support.service.in_process import Service
from tests.system.faults.chain import STEPS, Case, Environment, OpenFlow, Step

__all__ = ["records"]


@pytest.fixture(scope="module")
def environment(
    prefect_api: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    """Start a service on sockets, with simulated workers and limits that are high enough for all cases."""
    folder = tmp_path_factory.mktemp("faults")
    room: dict[str, Any] = {"maximum_active_jobs": 1000, "maximum_deployments": 1000}
    with Service(folder / "data", **room) as service:
        service.listen()
        with OpenFlow() as flow, Environment(service, flow, folder) as created:
            yield created


@pytest.fixture(params=STEPS, ids=lambda step: step.name)
def case(request: pytest.FixtureRequest, environment: Environment) -> Iterator[Case]:
    """Prepare a step for a fault, under a unique name, so that it shares no key or stored result with another case."""
    step: Step = request.param
    created = Case(environment, step, f"cell-{uuid4().hex[:12]}")
    environment.waited.clear()
    yield created
    created.heal()
    step.clean(created)
