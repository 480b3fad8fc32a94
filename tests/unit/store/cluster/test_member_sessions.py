"""A member of a cluster is there as long as its session on Postgres, and only then its idempotency keys are its own."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from tests.support.databases.job_rows import NOW
from tests.support.databases.postgres_cluster import Cluster
from tests.support.waiting import until
from tuneship.contract.errors import InvalidRequestError
from tuneship.store.cluster import member_sessions
from tuneship.store.database.database import Database
from tuneship.store.records import idempotency

pytestmark = pytest.mark.postgres

KEY = idempotency.Key("alice", "k", "f")
ANSWER = idempotency.StoredAnswer(201, "/x", b"{}")
ONE, OTHER = 2**62, 7


@pytest.fixture
def database(postgres: Cluster) -> Iterator[Database]:
    with closing(Database(postgres.new_database(), is_shared=True)) as database:
        yield database


@contextmanager
def session_of(database: Database, number: int) -> Iterator[Any]:
    """The session of a member, as that of its news."""
    raw = database.engine.raw_connection()
    driver: Any = raw.driver_connection
    raw.detach()
    try:
        driver.autocommit = True
        member_sessions.hold(driver, number)
        yield driver
    finally:
        raw.close()


def is_gone(database: Database, number: int) -> bool:
    with database.write() as connection:
        return member_sessions.is_gone(connection, number)


def begin(database: Database, member: int) -> idempotency.StoredAnswer | idempotency.Hold:
    with database.write("alice") as connection:
        return idempotency.begin(connection, KEY, NOW, member)


def held(database: Database, member: int) -> idempotency.Hold:
    hold = begin(database, member)
    assert isinstance(hold, idempotency.Hold)
    return hold


def is_refused(database: Database, member: int) -> bool:
    try:
        begin(database, member)
    except InvalidRequestError as error:
        return (error.status, error.retryable) == (409, True)
    return False


def test_a_key_is_taken_over_as_soon_as_the_session_of_its_member_has_ended(
    database: Database,
) -> None:
    with session_of(database, ONE), session_of(database, OTHER):
        before = held(database, ONE)
        assert is_refused(database, OTHER)
        assert is_refused(database, ONE), "a second request at the same member"
    until(lambda: is_gone(database, ONE))
    with session_of(database, OTHER):
        # The moments are the same: the member alone distinguishes the two.
        after = held(database, OTHER)
        assert is_refused(database, ONE)
        with pytest.raises(InvalidRequestError), database.write("alice") as connection:
            idempotency.finish(connection, before, ANSWER)
        with database.write("alice") as connection:
            idempotency.abandon(connection, before)
            idempotency.finish(connection, after, ANSWER)
    assert begin(database, ONE) == ANSWER


def test_several_who_ask_at_once_find_the_same_and_a_member_comes_back_behind_them(
    database: Database,
) -> None:
    with database.write("alice") as one, database.write("bob") as two:
        assert [member_sessions.is_gone(each, ONE) for each in (one, two, one)] == [True] * 3
    with session_of(database, ONE), database.write("alice") as one, database.write("bob") as two:
        assert [member_sessions.is_gone(each, ONE) for each in (one, two)] == [False] * 2
