"""What a service is: alone on its database, or a member of a cluster, which shares it with others (docs/cluster.md).

A member takes part in the choice of a leader, and goes by the database's clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from tuneship.service.common.clock_watch import utc_now
from tuneship.service.common.database_clock import READ_EVERY_S, DatabaseClock
from tuneship.service.common.leadership import Leadership, LeaseLeadership, SoleService, Task
from tuneship.service.common.periodic import Periodic
from tuneship.store.database import Database


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Membership:
    """What differs between a service that is alone and a member of a cluster."""

    leadership: Leadership
    clock: Callable[[], datetime]
    is_fit: Callable[[], bool] = _always
    """Whether it may take requests."""
    tasks: Sequence[Task] = ()
    """What runs in the background for it."""


def alone() -> Membership:
    """The only service on its database."""
    return Membership(SoleService(), utc_now)


def member(database: Database, owner: str) -> Membership:
    """One of several services on a database; `owner` names it. Raises SQLAlchemy's errors."""
    clock = DatabaseClock(database)
    leadership = LeaseLeadership(database, owner)
    reading = Periodic(clock.read, READ_EVERY_S, "the database's clock could not be read")
    return Membership(leadership, clock, lambda: clock.is_good, (leadership, reading))
