"""The demand at all members of a cluster together, where they share their replicas.

Each member publishes its own demand once a second, and at once when a request waits for a replica; the leader adds
them up. What a member published last counts until its row lapses (`tuneship/store/cluster/member_demand.py`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from tuneship.host.thread_pools import Threads
from tuneship.host.waiting import wait_for_event
from tuneship.service.context.notifier import Notifier
from tuneship.service.telemetry.in_flight import Demand, InFlightGenerations
from tuneship.store.cluster import member_demand
from tuneship.store.database.database import Database
from tuneship.store.database.tables import MemberDemandRow

logger = logging.getLogger(__name__)

# A peak is published so often, as the leader may miss one of them.
PUBLISHED_TIMES = 3
TOPIC = "demand"
POLL_S = 0.25
END_S = 2.0


@dataclass(frozen=True)
class DemandTiming:
    """How often demand is published, and when that is known everywhere."""

    publish_every_s: float = 1.0
    # After this time every member has noticed that a deployment takes no more requests, and has published what it still
    # has in flight (`store/database/read_cache.py`).
    noticed_after: timedelta = timedelta(seconds=1.2)


class SharedDemand:
    """Publishes this member's demand, and adds up that of all."""

    def __init__(
        self,
        database: Database,
        in_flight: InFlightGenerations,
        notifier: Notifier,
        member: str,
        clock: Callable[[], datetime],
        timing: DemandTiming = DemandTiming(),
    ) -> None:
        """`member` names this process among the others; `clock` is the database's."""
        self._database = database
        self._in_flight = in_flight
        self._notifier = notifier
        self._member = member
        self._clock = clock
        self._timing = timing
        self._threads = Threads("demand", 2)
        self._needed = asyncio.Event()
        self._recent: deque[dict[str, Demand]] = deque(maxlen=PUBLISHED_TIMES)
        self._published: list[MemberDemandRow] = []

    def need(self) -> None:
        """Publish the demand now: a request waits for a replica. Called on the event loop's thread."""
        self._needed.set()

    async def run(self) -> None:
        """Publish the demand until cancelled; then take it back."""
        try:
            while True:
                is_urgent = self._needed.is_set()
                self._needed.clear()
                try:
                    await self._threads.run(self._publish, self._present())
                except SQLAlchemyError as error:  # the database is away: the next time publishes it
                    logger.warning("the demand could not be published: %s", type(error).__name__)
                except Exception:  # the loop must outlive any failure
                    logger.exception("the demand could not be published")
                else:
                    if is_urgent:
                        self._notifier.notify(TOPIC)
                await wait_for_event(self._needed, self._timing.publish_every_s)
        finally:
            await self._threads.finish(END_S)
            with suppress(SQLAlchemyError, TimeoutError):  # it lapses in any case
                async with asyncio.timeout(END_S):
                    await self._threads.run(self._take_back)

    def _present(self) -> dict[str, Any]:
        """The published demand of the last seconds, by deployment."""
        self._recent.append(self._in_flight.take_all_demand(self._clock()))
        present: dict[str, list[float]] = {}
        for name in {name for demands in self._recent for name in demands}:
            last = self._recent[-1].get(name, Demand())
            peak = max(demands[name].in_flight for demands in self._recent if name in demands)
            waited_s, now = last.waited.total_seconds(), self._in_flight.count(name)
            present[name] = [peak, last.waiting, waited_s, now]
        return present

    def _publish(self, demand: Mapping[str, Any]) -> None:
        with self._database.write_beside() as connection:
            member_demand.write(connection, self._member, demand)

    def _take_back(self) -> None:
        with self._database.write_beside() as connection:
            member_demand.remove(connection, self._member)

    # What all have published.

    def read(self) -> None:
        """Read the demand that all members have published. May block."""
        with self._database.read() as connection:
            self._published = member_demand.of_live(connection)

    def demand_of(self, deployment_id: str) -> Demand:
        """The demand on a deployment at all members, as of the last read."""
        in_flight = waiting = 0
        waited_s = 0.0
        for row in self._published:
            peak, queued, longest_s, _ = row["demand"].get(deployment_id, (0, 0, 0.0, 0))
            in_flight, waiting, waited_s = (
                in_flight + int(peak),
                waiting + int(queued),
                max(waited_s, longest_s),
            )
        return Demand(in_flight, waiting, timedelta(seconds=waited_s))

    async def wait_until_drained(self, deployment_id: str, timeout_s: float) -> None:
        """Return when no member has a request to the deployment in flight, or after the timeout.

        Raises SQLAlchemy's errors.
        """
        loop, since = asyncio.get_running_loop(), self._clock() + self._timing.noticed_after
        deadline = loop.time() + timeout_s
        while loop.time() < deadline:
            await self._threads.run(self.read)
            # A crash of Postgres empties the table; where this member's row is again, the others' are soon.
            is_here = any(row["member"] == self._member for row in self._published)
            if is_here and all(
                row["written_at"] >= since and not row["demand"].get(deployment_id, (0,))[-1]
                for row in self._published
            ):
                return
            await asyncio.sleep(POLL_S)
