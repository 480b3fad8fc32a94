"""Writers of one tenant wait for each other, those of two do not, and what is checked first holds for each tenant."""

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from tests.support.databases.postgres_cluster import Cluster
from tests.support.waiting import until
from tests.unit.store.database.test_rows import new_row
from tuneship.contract.endpoints import EndpointStatus
from tuneship.contract.errors import InvalidRequestError
from tuneship.service.access.api_keys import Keys
from tuneship.store.cluster.leader_lease import LeadershipLost
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.records import (
    audit,
    endpoint_records,
    idempotency,
    job_leases,
    job_records,
    outbox,
)
from tuneship.store.records.audit import AuditRecord, Chain
from tuneship.store.records.job_leases import LEASE, JobLease

pytestmark = pytest.mark.postgres

NOW = datetime(2026, 7, 1, 12, 30, tzinfo=UTC)
CHAIN = Chain(b"a" * 32)
TENANTS = ("alice", "bob")
QUOTA = 20


@pytest.fixture
def members(postgres: Cluster) -> Iterator[tuple[Database, Database]]:
    """The same database, opened by two members of a cluster."""
    url = postgres.new_database()
    with (
        closing(Database(url, is_shared=True)) as one,
        closing(Database(url, is_shared=True)) as two,
    ):
        yield one, two


def together(*works: Callable[[], None]) -> None:
    """Run all of these at once; an error in one is raised here."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def waiting_for_a_lock(database: Database) -> int:
    """How many connections to the database wait for an advisory lock."""
    query = (
        "select count(*) from pg_locks where locktype = 'advisory' and not granted"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    with database.read(first=True) as connection:
        return connection.exec_driver_sql(query).scalar_one()


class Writer:
    """A write transaction that another thread begins, and ends at once."""

    def __init__(self, database: Database, tenant: str | None) -> None:
        self.has_begun = threading.Event()
        self._database, self._tenant = database, tenant
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        with self._database.write(self._tenant):
            self.has_begun.set()

    def join(self) -> None:
        self._thread.join()
        assert self.has_begun.is_set()


def test_a_writer_waits_for_those_of_its_own_tenant_only(
    members: tuple[Database, Database],
) -> None:
    one, two = members
    with one.write("alice"):
        for member in members:
            with member.write("bob") as connection:
                job_records.add_log(connection, "ft_bob", NOW, "info", "m")
        writer = Writer(two, "alice")
        until(lambda: waiting_for_a_lock(one) == 1)
        assert not writer.has_begun.is_set()
    writer.join()


@pytest.mark.parametrize(("held", "asked"), [("alice", None), (None, "alice"), (None, None)])
def test_a_writer_for_all_tenants_is_alone(
    members: tuple[Database, Database], held: str | None, asked: str | None
) -> None:
    one, two = members
    with one.write(held):
        writer = Writer(two, asked)
        until(lambda: waiting_for_a_lock(one) == 1)
        assert not writer.has_begun.is_set()
    writer.join()


@pytest.mark.parametrize("held", ["alice", None])
def test_a_write_without_a_tenant_waits_for_no_writer(
    members: tuple[Database, Database], held: str | None
) -> None:
    with members[0].write(held):
        for member in members:
            with member.write_beside() as connection:
                job_records.add_log(connection, "ft_1", NOW, "info", "m")
        with members[1].read() as connection:
            assert rows.count(connection, tables.job_logs) == 2


def test_concurrent_writes_are_fenced_too(members: tuple[Database, Database]) -> None:
    def fence(_connection: sa.Connection) -> None:
        raise LeadershipLost

    for begin in (Database.write, Database.write_beside):
        with pytest.raises(LeadershipLost), begin(members[0].fenced(fence)) as connection:
            job_records.add_log(connection, "ft_1", NOW, "info", "m")


def test_postgres_ends_a_member_that_stands_still_in_any_transaction(
    members: tuple[Database, Database], postgres: Cluster
) -> None:
    """The waiting is Postgres' own: each kind of transaction is asked for how long it may do nothing."""
    member = members[0]
    kinds = (lambda: member.write("alice"), member.write, member.write_beside, member.read)
    assert [idle_timeout(begin) for begin in kinds] == ["10s"] * 4
    assert idle_timeout(lambda: member.write_beside(first=True)) == "10s"
    with closing(Database(postgres.new_database())) as alone:
        assert idle_timeout(alone.write) == "0"


def idle_timeout(begin: Callable[[], AbstractContextManager[sa.Connection]]) -> str:
    with begin() as connection:
        return connection.exec_driver_sql("show idle_in_transaction_session_timeout").scalar_one()


def test_checks_and_writes_of_two_tenants_at_once_hold_for_each(
    members: tuple[Database, Database],
) -> None:
    """Quotas, counters, event numbers, idempotency keys and the order of the audit chain, under twelve writers."""
    made: defaultdict[str, list[str]] = defaultdict(list)
    held: Counter[str] = Counter()

    def create(database: Database, tenant: str, writer: int) -> Callable[[], None]:
        def work() -> None:
            for number in range(8):
                identifier = f"ds_{tenant}_{writer}_{number}"
                with database.write(tenant) as connection:
                    key = idempotency.Key(tenant, f"key {number}", "f")
                    try:
                        idempotency.begin(connection, key, NOW)
                        held[f"{tenant} {number}"] += 1
                    except InvalidRequestError:
                        pass
                    is_own = tables.datasets.c.client_id == tenant
                    if rows.count(connection, tables.datasets, is_own) >= QUOTA:
                        continue
                    row = new_row(tables.datasets, identifier, tenant)
                    rows.insert(connection, tables.datasets, row)
                    subject = {"id": f"shared by {tenant}", "client_id": tenant}
                    outbox.emit(connection, "dataset.uploaded", subject, NOW, of=identifier)
                    CHAIN.add(connection, entry(tenant, identifier))
                    # Under the tenant's lock, so in the order of the commits.
                    made[tenant].append(identifier)

        return work

    def link() -> None:
        for _ in range(20):
            for database in members:
                CHAIN.link_all(database)

    writers = [
        create(database, tenant, 10 * number + place)
        for number in range(3)
        for place, database in enumerate(members)
        for tenant in TENANTS
    ]
    together(*writers, link, link)
    CHAIN.link_all(members[0])

    assert set(held.values()) == {1}, "an idempotency key is held once"
    with members[1].read() as connection:
        for tenant in TENANTS:
            is_own = tables.datasets.c.client_id == tenant
            assert rows.count(connection, tables.datasets, is_own) == QUOTA
            delivered = outbox.events_of(connection, tenant, NOW, after=0, limit=100)
            assert [one["sequence"] for one in delivered] == list(range(1, QUOTA + 1))
            assert [one["data"]["of"] for one in delivered] == made[tenant]
            audited = audit.rows_of(connection, client_id=tenant)
            assert [one["resource_id"] for one in audited] == made[tenant]
        assert CHAIN.fault(audit.rows_of(connection)) is None
        assert CHAIN.unlinked(connection).number == 0


def entry(tenant: str, resource: str) -> AuditRecord:
    return AuditRecord(NOW, tenant, "k", "upload_dataset", resource, 201, "::1", "req")


def audited(connection: sa.Connection) -> Sequence[str | None]:
    return [row["resource_id"] for row in audit.rows_of(connection)]


def test_a_row_is_linked_after_its_commit_also_when_later_ones_were_linked_before(
    members: tuple[Database, Database],
) -> None:
    one, two = members
    with one.write("alice") as slow:
        CHAIN.add(slow, entry("alice", "first written"))
        with two.write("bob") as connection:
            CHAIN.add(connection, entry("bob", "first committed"))
        CHAIN.link_all(two)
        with two.read() as connection:
            assert audited(connection) == ["first committed"]
    with two.read() as connection:
        assert CHAIN.unlinked(connection).number == 1
    CHAIN.link_all(two)
    with one.read() as connection:
        assert audited(connection) == ["first committed", "first written"]
        assert CHAIN.fault(audit.rows_of(connection)) is None


def test_a_row_that_somebody_else_put_before_the_chain_stays_there(
    members: tuple[Database, Database],
) -> None:
    one, two = members
    with one.write("alice") as connection:
        CHAIN.add(connection, entry("alice", "genuine"))
    with one.write() as connection:
        Chain(b"another key" * 3).add(connection, entry("alice", "forged"))
    with one.write("alice") as connection:
        CHAIN.add(connection, entry("alice", "genuine, too"))
    CHAIN.link_all(two)
    with two.read() as connection:
        assert audited(connection) == ["genuine", "genuine, too"]
        found = CHAIN.unlinked(connection)
    assert (found.number, found.forged, found.oldest) == (1, 1, NOW)


def test_more_rows_than_one_transaction_links(members: tuple[Database, Database]) -> None:
    written = [entry("alice", f"{number}") for number in range(2_500)]
    with members[0].write("alice") as connection:
        for one in written:
            CHAIN.add(connection, one)
    together(*(lambda database=database: CHAIN.link_all(database) for database in members))
    with members[0].read() as connection:
        assert audited(connection) == [one.resource_id for one in written]
        assert CHAIN.fault(audit.rows_of(connection)) is None


def test_members_store_the_uses_of_the_same_keys_at_once(
    members: tuple[Database, Database],
) -> None:
    moments = iter(NOW + timedelta(minutes=2 * number) for number in range(10_000))
    clock_lock = threading.Lock()

    def clock() -> datetime:
        with clock_lock:
            return next(moments)

    kept = [Keys(database, b"pepper", clock, CHAIN) for database in members]
    issued = [kept[0].issue("alice", frozenset({"generate"}), None) for _ in range(12)]

    def use(keys: Keys, seed: int) -> Callable[[], None]:
        def work() -> None:
            dice = random.Random(seed)  # noqa: S311 - only for the order
            for _ in range(15):
                for key in dice.sample(issued, len(issued)):
                    keys.authenticate([f"Bearer {key}"], ["alice"])
                keys.store_uses()

        return work

    together(*(use(keys, number) for number, keys in enumerate(kept)))
    assert all(one["last_used_at"] is not None for one in kept[0].listed())


def test_leases_of_jobs_are_renewed_while_their_tenants_rows_are_held(
    members: tuple[Database, Database],
) -> None:
    one, two = members
    leases = [JobLease(f"ft_{tenant}", 1, tenant) for tenant in TENANTS]
    with one.write() as connection:
        for lease in leases:
            running = {"attempt": lease.attempt, "lease_until": NOW}
            row = new_row(tables.jobs, lease.job_id, lease.client_id, **running)
            rows.insert(connection, tables.jobs, row)
    with one.write("alice"), one.write("bob"), two.write_beside(first=True) as connection:
        job_leases.renew(connection, reversed(leases), NOW + LEASE)
    with one.read() as connection:
        query = sa.select(tables.jobs.c.lease_until)
        assert set(connection.scalars(query)) == {NOW + LEASE + LEASE}


def test_a_lapsed_split_is_ended_for_its_own_tenant_only(
    members: tuple[Database, Database],
) -> None:
    one, two = members
    old, new = ([{"id": name, "traffic_percentage": 100}] for name in ("dep_old", "dep_new"))
    leased = {"members": new, "lease_fallback": old, "lease_seconds": 1, "lease_until": NOW}
    with one.write() as connection:
        for tenant in TENANTS:
            row = new_row(tables.endpoints, f"cep_{tenant}", tenant)
            status = EndpointStatus.ACTIVE
            rows.insert(connection, tables.endpoints, row | leased | {"status": status})
    with one.read() as connection:
        assert endpoint_records.lapsed(connection, NOW) == {"cep_alice": "alice", "cep_bob": "bob"}
    with one.write("bob"), two.write("alice", first=True) as connection:
        assert endpoint_records.revert_lapsed(connection, "alice", NOW) == {"cep_alice": None}
    with one.read() as connection:
        assert endpoint_records.lapsed(connection, NOW) == {"cep_bob": "bob"}
        delivered = outbox.events_of(connection, "alice", NOW, after=0, limit=10)
    assert [(event["type"], event["sequence"]) for event in delivered] == [
        ("canary_endpoint.reverted", 1)
    ]
