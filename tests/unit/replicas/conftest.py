"""A group of replicas whose processes the tests play."""

from pathlib import Path

import pytest

from tests.support.engines import PlayedEngines
from tuneship.replicas.local_replicas import ReplicaSet, replica_process


@pytest.fixture
def engines() -> PlayedEngines:
    return PlayedEngines([5, 6])


@pytest.fixture
def group(engines: PlayedEngines, tmp_path: Path) -> ReplicaSet:
    return ReplicaSet(replica_process(engines), tmp_path / "base", tmp_path / "replica.log")
