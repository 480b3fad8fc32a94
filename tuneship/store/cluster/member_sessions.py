"""Which members of a cluster are there: each holds a lock by its number in a session on Postgres.

The lock ends with the session: at once when the process is killed, and after some seconds when its machine is lost. It
needs no row, no clock and no heartbeat, so a member that is only slow is never taken for one that is gone. A member
whose connection broke is without it until it has a new one. Postgres only.
"""

from typing import Any

import sqlalchemy as sa

# The number of a service that is alone, which needs no lock.
ALONE = 0
# A machine that has answered nothing for this long is lost. Through a local socket Postgres ignores this.
LOST = {
    "tcp_keepalives_idle": "3",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "6000",
}


def hold(driver: Any, number: int) -> None:
    """Keep a driver connection open, in autocommit mode, as the sign that a member is alive, until it is closed.

    `number` is that of one process alone. Raises psycopg's errors, e.g. while the server still waits for a connection
    of this member that broke.
    """
    for setting, value in LOST.items():
        driver.execute("select set_config(%s, %s, false)", (setting, value))
    driver.execute("select pg_advisory_lock(%s)", (number,))


def is_gone(connection: sa.Connection, number: int) -> bool:
    """Whether a member has no session. If so, the member cannot get its lock before this transaction ends."""
    # Shared, so that several who ask at once do not take each other for the member.
    free = sa.select(sa.func.pg_try_advisory_xact_lock_shared(number))
    return bool(connection.execute(free).scalar_one())
