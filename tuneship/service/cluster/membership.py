"""A service is alone on its database, or a member of a cluster, which shares it with others (docs/cluster.md).

A member takes part in the choice of a leader, goes by the database's clock, and publishes what it has changed.
"""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from tuneship.service.background.clock_watch import utc_now
from tuneship.service.background.periodic import Periodic
from tuneship.service.cluster.database_clock import READ_EVERY_S, DatabaseClock
from tuneship.service.cluster.leadership import (
    BackgroundTask,
    Leadership,
    LeaseLeadership,
    SoleService,
)
from tuneship.service.context.notifier import Notifier, SharedNotifier
from tuneship.store.cluster.leader_lease import LEASE_S
from tuneship.store.cluster.member_sessions import ALONE
from tuneship.store.cluster.news import ANYTHING, ROWS, News
from tuneship.store.database.database import Database

NUMBERS = 2**62


@dataclass(frozen=True)
class Membership:
    """The differences between a service that is alone and a member of a cluster."""

    # Names this process among the members.
    name: str
    leadership: Leadership
    clock: Callable[[], datetime]
    notifier: Notifier
    # Whether it may take requests.
    is_fit: Callable[[], bool] = lambda: True
    # Its background work.
    tasks: Sequence[BackgroundTask] = ()
    # The number of this process: of the metrics that it stores, and of the keys that it works on.
    number: int = ALONE


def alone() -> Membership:
    """The only service on its database."""
    return Membership("", SoleService(), utc_now, Notifier())


def member(database: Database, owner: str, lease_s: float = LEASE_S) -> Membership:
    """One of several services on a database; `owner` names it. Raises SQLAlchemy's errors."""
    # Drawn at each start from so many that nobody, not even this member before a restart, has the same one.
    number = secrets.randbelow(NUMBERS) + 1
    clock, news = DatabaseClock(database), News(database, number)
    notifier, cache = SharedNotifier(news.publish), database.share_cache(lambda: news.publish(ROWS))

    def hear(topics: Collection[str]) -> None:
        cache.drop()
        database.announce()
        if ANYTHING in topics:
            notifier.wake_all()
        for topic in topics:
            notifier.wake(topic)

    news.subscribe(hear)
    leadership = LeaseLeadership(database, owner, lease_s)
    reading = Periodic(clock.read, READ_EVERY_S, "the database's clock could not be read")
    return Membership(
        owner,
        leadership,
        clock,
        notifier,
        is_fit=lambda: clock.is_good,
        tasks=(leadership, reading, news),
        number=number,
    )
