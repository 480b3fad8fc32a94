"""A group of replicas whose processes the tests play."""

from pathlib import Path

import pytest

from tests.support.service.engines import PlayedEngines
from tuneship.replicas.local_replicas import LocalReplicas, process_starter


@pytest.fixture
def engines() -> PlayedEngines:
    return PlayedEngines([5, 6])


@pytest.fixture
def group(engines: PlayedEngines, tmp_path: Path) -> LocalReplicas:
    return LocalReplicas(process_starter(engines), tmp_path / "base", tmp_path / "replica.log")
