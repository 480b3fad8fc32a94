"""Members of a cluster, and a database that they share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.members import SHORT_LEASE_S, cluster_of
from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.in_process import Service
from tuneship.store.database.database import Database


@pytest.fixture
def members(tmp_path: Path, postgres: Cluster) -> Iterator[list[Service]]:
    """Two members, of which the first one leads."""
    with cluster_of(tmp_path, postgres.new_database()) as members:
        yield members


@pytest.fixture
def lapsing(tmp_path: Path, postgres: Cluster) -> Iterator[list[Service]]:
    """Two members with a lease that is short enough to wait for its end."""
    with cluster_of(tmp_path, postgres.new_database(), lease_s=SHORT_LEASE_S) as members:
        yield members


@pytest.fixture
def database(postgres: Cluster) -> Iterator[Database]:
    """A new database, opened as a member does."""
    database = Database(postgres.new_database(), is_shared=True)
    yield database
    database.close()
