"""Works on resources whose requests are answered in the background: batches and evaluations. The leader runs it.

It keeps no state that matters: the rows say where each resource is, and after a kill it goes on from what was stored.
Work that fails by a fault of the service is tried a few times, then the resource fails.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, Protocol, TypedDict, TypeVar

import sqlalchemy as sa

from tuneship.host.thread_pools import Threads
from tuneship.host.ticks import Ticks
from tuneship.service.background.background_retries import BackgroundRetries
from tuneship.service.background_requests.background_run import BackgroundRun, BackgroundTiming
from tuneship.service.background_requests.pace import BackgroundPace
from tuneship.store.database.database import Database
from tuneship.store.records import api_key_records

logger = logging.getLogger(__name__)

# Resources that are worked on at the same time, of one tenant and of all; the others wait, the oldest first. A tenant
# that has none at work is let in beyond the second number, since the others' may take a day.
AT_ONCE_EACH = 2
AT_ONCE = 8


class WorkRow(TypedDict):
    """The columns that the keeper reads."""

    id: str
    client_id: str
    caller: dict[str, Any]


R = TypeVar("R", bound=WorkRow)


class BackgroundWork(Protocol):
    """The work on one resource."""

    @property
    def requests(self) -> BackgroundRun:
        """Its requests, with their cancellation."""
        ...

    async def run(self) -> None:
        """Work until the resource has ended."""
        ...


class BackgroundKind(Protocol[R]):
    """One kind of resource with background requests."""

    # The name of a resource, for the log.
    name: str
    # Raised where somebody else has changed the resource.
    lost: type[Exception]

    def open_rows(self, connection: sa.Connection) -> Sequence[R]:
        """The resources of all tenants that have not ended, oldest first."""
        ...

    def begin(
        self, row: R, pace: BackgroundPace, threads: Threads, timing: BackgroundTiming
    ) -> BackgroundWork:
        """The work on a resource from its present state."""
        ...

    def is_asking(self, row: R) -> bool:
        """Whether it asks models, or is going to."""
        ...

    def why_stop(self, row: R) -> str:
        """Why no further request is answered; empty while requests are."""
        ...

    def cancel_for_its_key(self, row: R) -> None:
        """End it because the key that made it has ended. In a thread."""
        ...

    def give_up(self, row: R, error: Exception) -> None:
        """End it after a fault of the service. In a thread."""
        ...


def to_start(waiting: Sequence[R], running: Mapping[str, int]) -> list[R]:
    """Choose the waiting resources to start, oldest first. Every tenant gets a first one before any gets a second.

    `running`: how many of each tenant are at work.
    """
    counts, chosen = Counter(running), dict[str, R]()
    for number in range(AT_ONCE_EACH):
        for row in waiting:
            client = row["client_id"]
            has_place = number == 0 or counts.total() < AT_ONCE
            if counts[client] == number and has_place and row["id"] not in chosen:
                counts[client] += 1
                chosen[row["id"]] = row
    return [*chosen.values()]


class BackgroundKeeper(Generic[R]):
    """The loop over the resources of one kind, and a task for each that is worked on."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Callable[[], datetime],
        kind: BackgroundKind[R],
        pace: BackgroundPace,
    ) -> None:
        """`pace` is shared with the keepers of other kinds."""
        self._database = database
        self._clock = clock
        self._kind = kind
        self._pace = pace
        self._ticks = Ticks()
        self._retries = BackgroundRetries(clock)
        self._runs: dict[str, BackgroundWork] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Resources that are being cancelled because their key has ended.
        self._ending: dict[str, asyncio.Task[None]] = {}
        self.threads = Threads(f"{kind.name} work", 4)
        self.timing = BackgroundTiming()

    async def run(self) -> None:
        """Work until cancelled; answers that were not stored by then are generated again after the next start."""
        try:
            with self._database.listening(self._ticks.wake):
                await self._ticks.repeat(self._look)
        finally:
            tasks = [*self._tasks.values(), *self._ending.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        found, ended_keys = await self.threads.run(self._open_rows)
        self._retries.keep_only([row["id"] for row in found])
        for gone in self._runs.keys() - {row["id"] for row in found}:
            self._runs[gone].requests.cancel(f"{self._kind.name}_cancelled")
        waiting: list[R] = []
        for row in found:
            is_asking, run = self._kind.is_asking(row), self._runs.get(row["id"])
            if row["caller"]["key_id"] in ended_keys and is_asking:
                if row["id"] not in self._ending:
                    # In a task: its tenant's writer may be busy.
                    self._ending[row["id"]] = asyncio.create_task(self._cancel(row))
            elif row["id"] not in self._tasks and not self._retries.is_waiting(row["id"]):
                # One that asks for nothing more needs no place.
                if is_asking:
                    waiting.append(row)
                else:
                    self._start(row)
            elif run is not None and (why_stop := self._kind.why_stop(row)):
                run.requests.cancel(why_stop)
        asking = [one for one in found if one["id"] in self._tasks and self._kind.is_asking(one)]
        for row in to_start(waiting, Counter(one["client_id"] for one in asking)):
            self._start(row)

    def _open_rows(self) -> tuple[Sequence[R], set[str]]:
        """The resources, and the keys among theirs that have ended."""
        with self._database.read() as connection:
            found = self._kind.open_rows(connection)
            keys = {row["caller"]["key_id"] for row in found}
            return found, api_key_records.ended(connection, keys, self._clock())

    async def _cancel(self, row: R) -> None:
        """Cancel a resource because its key has ended."""
        try:
            await self.threads.run(self._kind.cancel_for_its_key, row)
            if row["id"] in self._runs:
                self._runs[row["id"]].requests.cancel(f"{self._kind.name}_cancelled")
        except self._kind.lost:
            pass
        except Exception:  # the next look tries again
            logger.exception("a %s could not be cancelled: %s", self._kind.name, row["id"])
        finally:
            del self._ending[row["id"]]

    def _start(self, row: R) -> None:
        self._tasks[row["id"]] = asyncio.create_task(self._work(row))

    async def _work(self, row: R) -> None:
        identifier = row["id"]
        try:
            given_up = self._retries.given_up(identifier)
            if given_up is None:
                work = self._kind.begin(row, self._pace, self.threads, self.timing)
                self._runs[identifier] = work
                await work.run()
            else:
                await self.threads.run(self._kind.give_up, row, given_up)
        except self._kind.lost:
            pass  # its row has changed, e.g. it is being cancelled: the next look begins from there
        except Exception as error:  # the others go on, whatever fails
            logger.exception("a %s could not be worked on: %s", self._kind.name, identifier)
            self._retries.add(identifier, error)
        finally:
            self._runs.pop(identifier, None)
            del self._tasks[identifier]
            self._ticks.wake()
