"""Decides which process does the work that only one may do: the only process, or the leader of a cluster.

`SoleService` is for the one service on a database. `LeaseLeadership` is for a member of a cluster: it takes the lease
when it is free (`store/cluster/leader_lease.py`), renews it, and ends its work as soon as it may be another's.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from tuneship.host.thread_pools import Threads
from tuneship.service.background.shutdown import end_tasks
from tuneship.store.cluster import leader_lease
from tuneship.store.cluster.leader_lease import LEASE_S, LeadershipLost
from tuneship.store.database.database import Database, Fence

# A lapsed lease is found after this time at the latest.
LOOK_EVERY_S = 0.5
# Shares of the lease after which it is renewed, and after which a leader stops, counted from the begin of the last
# renewal: well before another one can take it.
RENEW_AFTER, STOP_AFTER = 0.25, 0.75
# The timeout of work whose right is lost. Whatever hangs longer is fenced.
END_S = 6.0
GIVE_BACK_POLL_S = 0.1


class BackgroundTask(Protocol):
    """A background task, which runs until it is cancelled."""

    async def run(self) -> None: ...


Lead = Callable[[Fence | None], Awaitable[None]]

logger = logging.getLogger(__name__)


class Leadership(Protocol):
    """Whether this process leads, and the fence around its writes as leader."""

    @property
    def leads(self) -> bool:
        """Whether this process leads now. May be read from any thread."""
        ...

    def fence(self, connection: sa.Connection) -> None:
        """Begin a transaction of the leader. Raises `LeadershipLost`."""
        ...

    async def while_leading(self, lead: Lead) -> None:
        """Call `lead` each time that this process becomes the leader, and cancel it when it is not any more.

        The fence that it gets is one for this time only: what was begun in an earlier time cannot write by it. None:
        nobody else can lead.
        """
        ...


class Led:
    """A background task that runs while this process leads, and writes behind the fence."""

    def __init__(
        self, leadership: Leadership, database: Database, make: Callable[[Database], BackgroundTask]
    ) -> None:
        """`make`: makes a new task for each term of leadership."""
        self._leadership = leadership
        self._database = database
        self._make = make

    async def run(self) -> None:
        """Run until cancelled."""
        await self._leadership.while_leading(self._lead)

    async def _lead(self, fence: Fence | None) -> None:
        await self._make(self._database.fenced(fence)).run()


class SoleService:
    """The leadership of the only service on a database, which always leads."""

    leads = True

    def fence(self, connection: sa.Connection) -> None:
        """Let every transaction pass."""

    async def while_leading(self, lead: Lead) -> None:
        """Call `lead` once."""
        await lead(None)


class _Term:
    """One term of leadership, from taking the lease to losing it."""

    def __init__(self, epoch: int, acts_until: float) -> None:
        self.epoch = epoch
        # Until when it may act, by `time.monotonic`, which goes on while the process stands still.
        self.acts_until = acts_until
        self.ended = asyncio.Event()

    @property
    def is_live(self) -> bool:
        return time.monotonic() < self.acts_until

    def fence(self, connection: sa.Connection) -> None:
        if not self.is_live:
            raise LeadershipLost
        leader_lease.check_epoch(connection, self.epoch)


class LeaseLeadership:
    """The leadership of a member of a cluster; `run` must run beside the led tasks."""

    def __init__(self, database: Database, owner: str, lease_s: float = LEASE_S) -> None:
        """`owner`: the name of this process in the rows and the log."""
        self._database = database
        self._owner = owner
        self._lease_s = lease_s
        self._threads = Threads("leadership", 1)
        self._term: _Term | None = None
        self._begun = asyncio.Event()
        # Number of the calls of `lead` that have not ended.
        self._at_work = 0

    @property
    def leads(self) -> bool:
        """Whether this process leads now. May be read from any thread."""
        term = self._term
        return term is not None and term.is_live

    def fence(self, connection: sa.Connection) -> None:
        """Begin a transaction of the present term. Raises `LeadershipLost`."""
        term = self._term
        if term is None:
            raise LeadershipLost
        term.fence(connection)

    # What is led.

    async def while_leading(self, lead: Lead) -> None:
        """Call `lead` in each term, and cancel it at the term's end."""
        while True:
            await self._begun.wait()
            term = self._term
            if term is None:
                continue
            self._at_work += 1
            try:
                await self._lead(lead, term)
            finally:
                self._at_work -= 1
            await term.ended.wait()

    async def _lead(self, lead: Lead, term: _Term) -> None:
        work = asyncio.ensure_future(lead(term.fence))
        ended = asyncio.create_task(term.ended.wait())
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            await end_tasks([work], END_S)

    # The lease.

    async def run(self) -> None:
        """Take the lease when it is free, and keep it until cancelled; then release it once the led tasks have
        ended.
        """
        try:
            while True:
                epoch = await self._taken()
                if epoch is not None:
                    await self._keep_renewing()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await self._give_back()

    async def _taken(self) -> int | None:
        """Take the lease if it is free, and begin a term."""
        began = time.monotonic()
        try:
            epoch = await self._threads.run(self._take)
        except SQLAlchemyError as error:  # the database is away: the next look tries again
            logger.warning("the lease of the leader could not be read: %s", type(error).__name__)
            return None
        except Exception:  # the loop must outlive any failure
            logger.exception("the lease of the leader could not be read")
            return None
        if epoch is not None:
            self._term = _Term(epoch, began + self._lease_s * STOP_AFTER)
            self._begun.set()
            logger.info("%s leads from now on, epoch %d", self._owner, epoch)
        return epoch

    def _take(self) -> int | None:
        with self._database.write_beside(first=True) as connection:
            leader_lease.prepare(connection)
            return leader_lease.take(connection, self._owner, self._lease_s)

    async def _keep_renewing(self) -> None:
        """Renew the lease until it cannot be kept; then end the term."""
        term = self._term
        while term is not None and term.is_live:
            left_s = term.acts_until - time.monotonic()
            await asyncio.sleep(min(self._lease_s * RENEW_AFTER, max(0.0, left_s)))
            await self._renew(term)
        self._end_term()

    async def _renew(self, term: _Term) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, term.acts_until - began)):
                is_ours = await self._threads.run(self._renewed, term, self._lease_s)
        except (SQLAlchemyError, TimeoutError) as error:
            logger.warning("the lease of the leader was not renewed: %s", type(error).__name__)
            return
        except Exception:  # the loop must outlive any failure
            logger.exception("the lease of the leader was not renewed")
            return
        term.acts_until = began + self._lease_s * STOP_AFTER if is_ours else began

    def _renewed(self, term: _Term, lease_s: float) -> bool:
        with self._database.write_beside(first=True) as connection:
            return leader_lease.renew(connection, term.epoch, lease_s)

    def _end_term(self) -> None:
        term, self._term = self._term, None
        self._begun.clear()
        if term is not None:
            term.acts_until = min(term.acts_until, time.monotonic())
            term.ended.set()
            logger.warning("%s does not lead any more, epoch %d", self._owner, term.epoch)

    async def _give_back(self) -> None:
        """Let the next leader begin at once, after this leader's tasks have ended."""
        term = self._term
        if term is None or not term.is_live:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while self._at_work and term.is_live:
                    await self._renew(term)
                    await asyncio.sleep(GIVE_BACK_POLL_S)
        self._end_term()
        with suppress(SQLAlchemyError):  # it lapses in any case
            await self._threads.run(self._renewed, term, 0.0)
