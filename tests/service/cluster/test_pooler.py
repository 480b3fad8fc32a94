"""Members work through PgBouncer in transaction mode, and what needs a session is refused there by name."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as WaitedTooLong

from tests.service.cluster.test_members import asked
from tests.service.cluster.test_writers import QUOTA, TENANTS, upload
from tests.support.cluster.members import cluster_of
from tests.support.databases.pooler import SESSIONS, Pooler, pooler_before
from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.in_process import split
from tests.support.waiting import until
from tuneship.service.open_installation import open_for_service
from tuneship.settings import ServiceSettings
from tuneship.store.database.database import (
    Database,
    DatabaseInUse,
    DatabaseTimeouts,
    PoolerInBetween,
)
from tuneship.store.installation import installation

pytestmark = pytest.mark.postgres

IGNORES = "ignore_startup_parameters = options"
NAMES = ("lock_timeout", "timezone", "idle_in_transaction_session_timeout")
STATE = f"select {', '.join(f'current_setting({name!r})' for name in NAMES)}"


@pytest.fixture
def pooler(postgres: Cluster) -> Iterator[Pooler]:
    with pooler_before(postgres) as pooler:
        yield pooler


def count_in(postgres: Cluster, url: str, what: str) -> int:
    """The number of rows of a view of the server about the database at `url`."""
    name = url.partition("?")[0].rpartition("/")[2]
    return postgres.run(f"select count(*) from {what} where datname = '{name}'")[0][0]  # noqa: S608 - the name is ours


@pytest.mark.slow
def test_two_members_share_the_few_connections_of_a_pooler(
    tmp_path: Path, postgres: Cluster, pooler: Pooler
) -> None:
    direct = postgres.new_database()
    chosen: dict[str, Any] = {"database_listen_url": direct, "maximum_datasets": QUOTA}
    with cluster_of(tmp_path, pooler.url(direct), **chosen) as members:
        leader, other = members
        uploads = [
            (member, tenant, f"key {number}")
            for number in range(QUOTA + 2)
            for tenant in TENANTS
            for member in members
        ]
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda one: upload(*one), uploads))
        assert {status for status, _ in answers} <= {201, 409, 429}
        for tenant in TENANTS:
            pages = [member.call("GET", "/v1/datasets", tenant).json() for member in members]
            assert [page["pagination"]["total"] for page in pages] == [QUOTA, QUOTA]

        async def heard() -> None:
            with other.parts.notifier.listening("ft_1") as news:
                leader.parts.notifier.notify("ft_1")
                await news.wait()

        other.run(heard())
        first, second = leader.deployment("first"), other.deployment("second")
        path = f"endpoints/{other.canary('c', {first: 100, second: 0})}"
        assert [asked(member, path)[1] for member in members] == [first, first]
        shares = split({first: 0, second: 100})
        assert leader.call("PATCH", f"/v1/canary-{path}", json=shares).status_code == 200
        for member in members:
            until(lambda member=member: asked(member, path)[1] == second)

        sessions = count_in(postgres, direct, "pg_stat_activity")
        leader.rest()
        until(lambda: other.leadership.leads)
        assert other.deployment_status(other.deployment("third")) == "running"
        # One more of each member listens.
        assert sessions <= SESSIONS + len(members)


def test_every_transaction_has_its_settings_whichever_session_it_gets(
    postgres: Cluster, pooler: Pooler
) -> None:
    direct = postgres.new_database()
    url = pooler.url(direct)
    with closing(Database(url, is_shared=True, listen_url=direct)) as database:

        def look(_: int) -> list[Any]:
            found = list[Any]()
            with database.read() as connection:
                found.append(connection.exec_driver_sql(STATE).one())
            with database.write("alice") as connection:
                found.append(connection.exec_driver_sql(STATE).one())
            with database.write_beside(first=True) as connection:
                found.append(connection.exec_driver_sql(STATE).one())
            return found

        # More often than psycopg would need to prepare a statement, which another session does not know.
        with ThreadPoolExecutor(8) as threads:
            for found in threads.map(look, range(64)):
                assert found == 3 * [("30s", "UTC", "10s")]


def test_a_lock_is_waited_for_as_long_as_without_a_pooler(
    postgres: Cluster, pooler: Pooler
) -> None:
    direct = postgres.new_database()
    hasty = DatabaseTimeouts(lock_ms=200)
    with (
        closing(Database(direct)) as holder,
        closing(Database(pooler.url(direct), listen_url=direct, timeouts=hasty)) as database,
        holder.write("alice"),
        pytest.raises(OperationalError, match="lock timeout"),
        database.write("alice"),
    ):
        pass


def test_the_claim_of_a_service_goes_past_the_pooler(postgres: Cluster, pooler: Pooler) -> None:
    direct = postgres.new_database()
    url = pooler.url(direct)
    with closing(Database(url, listen_url=direct)) as first:
        first.claim()
        with (
            closing(
                Database(url, listen_url=direct, timeouts=DatabaseTimeouts(claim_s=0.2))
            ) as second,
            pytest.raises(DatabaseInUse),
        ):
            second.claim()
    # The server notices the end of a connection only later.
    with closing(Database(url, listen_url=direct, timeouts=DatabaseTimeouts(claim_s=120))) as third:
        third.claim()


def test_a_pooler_is_refused_by_name_unless_the_server_is_named_too(
    tmp_path: Path, postgres: Cluster, pooler: Pooler
) -> None:
    direct, elsewhere = postgres.new_database(), postgres.new_database()
    named = "name the server itself in TUNESHIP_DATABASE_LISTEN_URL"
    settings = ServiceSettings(data_dir=tmp_path, database_url=pooler.url(direct))  # type: ignore[arg-type]
    with pytest.raises(PoolerInBetween, match=f"refuses our settings.*{named}"):
        open_for_service(settings, datetime.now(UTC))
    with pytest.raises(PoolerInBetween, match=named):
        installation.look(pooler.url(direct))
    with pooler_before(postgres, IGNORES) as ignoring:
        url, hasty = ignoring.url(direct), DatabaseTimeouts(news_s=0.5)
        for listen_url, refusal in (
            (None, "keeps the settings"),
            (url, "not heard"),
            (elsewhere, "not heard"),
        ):
            with (
                closing(Database(url, listen_url=listen_url, timeouts=hasty)) as database,
                pytest.raises(PoolerInBetween, match=f"{refusal}.*{named}"),
            ):
                database.claim()
            locks = (
                "pg_locks join pg_database on database = pg_database.oid and locktype = 'advisory'"
            )
            assert count_in(postgres, direct, locks) == 0


@pytest.mark.parametrize("url", [None, "sqlite:////tmp/secret.sqlite"])
@pytest.mark.parametrize("name", ["database_url", "database_listen_url"])
def test_the_url_past_a_pooler_is_for_a_postgres(name: str, url: str | None) -> None:
    given: dict[str, Any] = {
        "database_url": "postgresql+psycopg://pooler/d",
        "database_listen_url": "postgresql+psycopg://server/d",
    }
    assert ServiceSettings(**given).listen_url == given["database_listen_url"]
    if (name, url) == ("database_listen_url", None):
        assert ServiceSettings(**{**given, name: url}).listen_url is None
        return
    with pytest.raises(ValidationError, match=f"and {name} does not begin") as refused:
        ServiceSettings(**{**given, name: url})
    assert "secret" not in refused.value.errors()[0]["msg"]


@pytest.mark.parametrize("number", ["0", "7", "1001", "many"])
def test_a_number_of_connections_that_is_not_one_is_refused_by_name(number: str) -> None:
    with pytest.raises(ValidationError, match="database_connections"):
        ServiceSettings(database_connections=number)  # type: ignore[arg-type]


def test_a_member_opens_no_more_connections_than_it_may(postgres: Cluster) -> None:
    with closing(Database(postgres.new_database(), connections=8)) as database, ExitStack() as held:
        pool: Any = database.engine.pool
        pool._timeout = 0.1
        for _ in range(8):
            held.enter_context(database.read())
        with pytest.raises(WaitedTooLong):
            held.enter_context(database.read())
        held.enter_context(database.read(first=True))
