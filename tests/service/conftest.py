"""Services of their own for tests that change much, and one shared by tests that only look or are refused."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.service.in_process import Service


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("shared"), allow_fault_injection=True) as service:
        yield service


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts a service: `start(maximum_deployments=1)`."""
    numbers = count()
    with ExitStack() as opened:
        yield lambda **settings: opened.enter_context(
            Service(tmp_path / f"data-{next(numbers)}", **settings)
        )


@pytest.fixture
def service(start: Callable[..., Service]) -> Service:
    options: dict[str, Any] = {"allow_fault_injection": True}
    return start(**options)
