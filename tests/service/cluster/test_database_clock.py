"""The clock of a cluster is the database's, whatever this machine's clock says."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.databases.postgres_cluster import Cluster
from tuneship.service.cluster.database_clock import SLOW_S, STALE_AFTER_S, DatabaseClock
from tuneship.store.database.database import Database

pytestmark = pytest.mark.postgres


@pytest.fixture
def database(postgres: Cluster) -> Iterator[Database]:
    database = Database(postgres.new_database())
    yield database
    database.close()


class Elapsed:
    """Seconds that a test lets pass, by steps at each look if it wants."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_it_goes_on_from_the_databases_time_by_the_seconds_that_pass(database: Database) -> None:
    elapsed, before = Elapsed(), datetime.now(UTC)
    clock = DatabaseClock(database, elapsed)
    read = clock()
    # Postgres runs on this machine here.
    assert before <= read <= datetime.now(UTC)
    elapsed.now += 10
    assert clock() == read + timedelta(seconds=10)
    clock.read()
    assert read <= clock() <= datetime.now(UTC)


def test_a_slow_reading_is_thrown_away_and_without_a_good_one_it_is_stale(
    database: Database,
) -> None:
    elapsed = Elapsed()
    clock = DatabaseClock(database, elapsed)
    read = clock()
    elapsed.step = 2 * SLOW_S
    clock.read()
    passed = elapsed.now + elapsed.step - 1_000
    assert clock() == read + timedelta(seconds=passed)
    elapsed.step = 0
    assert clock.is_good
    elapsed.now += STALE_AFTER_S
    assert not clock.is_good
    clock.read()
    assert clock.is_good


def test_it_starts_though_every_reading_is_slow(database: Database) -> None:
    elapsed, before = Elapsed(), datetime.now(UTC)
    elapsed.step = 2 * SLOW_S
    assert DatabaseClock(database, elapsed)() >= before
