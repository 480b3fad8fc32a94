"""The lease by which one process on a database leads the others, and the fence around the leader's writes.

Each taking of the lease begins a new epoch, a number that only grows: also when a failover of the database has lost the
last of them, since it is at least the time in milliseconds. Every transaction of a leader first locks the row
that holds the epoch (`check_epoch`), so a process that has lost the lease without noticing, e.g. because it stood
still, can write nothing after its successor has begun. All times are the database's. Postgres only.
"""

import sqlalchemy as sa

from tuneship.store.database.tables import leader_leases, leaders

# Seconds for which a lease is taken or renewed.
LEASE_S = 6.0
ROLE = "supervisor"
# A leader that stands still inside a transaction holds the row of its epoch; Postgres ends it after this time, so that
# the next one can begin.
IDLE_TIMEOUT_MS = 2_000

NOW = sa.func.clock_timestamp()
MILLISECONDS = sa.cast(sa.extract("epoch", NOW) * 1000, sa.BigInteger)


class LeadershipLost(Exception):
    """Another process leads, or may soon: this one has no right to write for all."""


def prepare(connection: sa.Connection) -> None:
    """Make the rows that `take` changes, unless they are there."""
    for row in (
        "insert into leaders values (:role, '', 0) on conflict do nothing",
        "insert into leader_leases values (:role, 0, to_timestamp(0)) on conflict do nothing",
    ):
        connection.execute(sa.text(row), {"role": ROLE})


def take(connection: sa.Connection, owner: str, lease_s: float) -> int | None:
    """Take the lease if it has lapsed and no other process is taking it; return the new epoch."""
    lapsed = (leader_leases.c.role == ROLE) & (leader_leases.c.lease_until < NOW)
    free = sa.select(leader_leases.c.epoch).where(lapsed).with_for_update(skip_locked=True)
    if connection.execute(free).first() is None:
        return None
    # Waits for the transactions that the previous leader still has open: none of them can commit after this.
    begin = (
        sa.update(leaders)
        .where(leaders.c.role == ROLE)
        .values(owner=owner, epoch=sa.func.greatest(leaders.c.epoch + 1, MILLISECONDS))
        .returning(leaders.c.epoch)
    )
    epoch = connection.execute(begin).scalar_one()
    lease = {"epoch": epoch, "lease_until": _end(lease_s)}
    connection.execute(sa.update(leader_leases).where(leader_leases.c.role == ROLE).values(**lease))
    return epoch


def renew(connection: sa.Connection, epoch: int, lease_s: float) -> bool:
    """Renew the lease from now on; False if it is another epoch's. A lease of 0 s gives it back."""
    renewed = (
        sa.update(leader_leases)
        .where(leader_leases.c.role == ROLE, leader_leases.c.epoch == epoch)
        .values(lease_until=_end(lease_s))
    )
    return connection.execute(renewed).rowcount == 1


def check_epoch(connection: sa.Connection, epoch: int) -> None:
    """Block later epochs until this transaction ends. Raises `LeadershipLost` if one has begun."""
    timeout = sa.func.set_config(
        "idle_in_transaction_session_timeout", str(IDLE_TIMEOUT_MS), sa.true()
    )
    is_ours = (leaders.c.role == ROLE) & (leaders.c.epoch == epoch)
    held = sa.select(timeout).select_from(leaders).where(is_ours).with_for_update(read=True)
    if connection.execute(held).first() is None:
        raise LeadershipLost


def epoch_of(connection: sa.Connection) -> int:
    """The current epoch; behind the fence it is the caller's own."""
    present = sa.select(leaders.c.epoch).where(leaders.c.role == ROLE)
    return connection.execute(present).scalar_one()


def _end(lease_s: float) -> sa.ColumnElement[object]:
    return NOW + sa.func.make_interval(0, 0, 0, 0, 0, 0, lease_s)
