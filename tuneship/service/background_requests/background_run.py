"""Answers many requests, several at a time, and stores their answers in the order of the requests.

The count of the stored answers is all that a restart needs: whoever goes on sends the requests behind them. Requests
that are cancelled go on in the same way: each that is left gets its `unanswered` instead of an answer.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tuneship.host.disk_space import DiskNearlyFull
from tuneship.host.thread_pools import Threads
from tuneship.host.waiting import wait_for_event
from tuneship.service.background_requests.answering import (
    BackgroundAnswer,
    BackgroundCaller,
    BackgroundRequest,
    answer,
)
from tuneship.service.background_requests.pace import BackgroundPace
from tuneship.service.context.context import NewContext

logger = logging.getLogger(__name__)

# Keeps answers, which follow those of the call before.
Store = Callable[[Sequence[BackgroundAnswer]], None]
POLL_S = 0.05
# Requests that were begun and are not stored: one that takes long holds up no more than these.
BEGUN_AT_MOST = 256
READ_AT_ONCE = 64
# Bytes of answers, of embeddings above all, that wait in memory to be stored.
STORED_AT_BYTES = 8 << 20
# Bytes of answers that wait behind one that takes long.
HELD_AT_MOST_BYTES = 64 << 20
# The pause before answers are stored again for which the disk had no room; nothing is asked meanwhile.
ROOM_PAUSE_S = 5.0


@dataclass(frozen=True)
class BackgroundTiming:
    """When to store answers (few writes even if answers are slow), and when to retry."""

    # Answers are stored after this time, as soon as there are `enough`.
    soon_s: float = 2.0
    enough: int = 64
    # Answers are stored after this time, as many as there are.
    late_s: float = 30.0
    # The pauses before a request is retried; after the last one its error is the answer.
    retry_after_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


class BackgroundRun:
    """Answers the requests of one resource."""

    def __init__(
        self,
        new_context: NewContext,
        caller: BackgroundCaller,
        pace: BackgroundPace,
        threads: Threads,
        timing: BackgroundTiming,
    ) -> None:
        """`threads`: read requests and store answers."""
        self._new_context = new_context
        self._caller = caller
        self._pace = pace
        self._threads = threads
        self._timing = timing
        self._changed = asyncio.Event()
        # Requests and their answers, which are cancelled where a request is not answered any more.
        self._begun: deque[tuple[BackgroundRequest, asyncio.Future[BackgroundAnswer]]] = deque()
        # The next answers to be stored.
        self._answers: list[BackgroundAnswer] = []
        self._stored_at = asyncio.get_running_loop().time()
        # The time before which the disk has no room.
        self._has_room_at = self._stored_at
        # The reason why no further request is answered; empty while requests are.
        self.why_not = ""

    def cancel(self, why_not: str) -> None:
        """Answer no further request, and cancel those in flight."""
        if self.why_not:
            return
        self.why_not = why_not
        for _, coming in self._begun:
            coming.cancel()
        self._changed.set()

    async def run(self, requests: Iterator[BackgroundRequest], store: Store) -> None:
        """Answer all requests, and store the answers.

        `store` is called in a thread. Where it raises `DiskNearlyFull`, the answers are stored later; any other error
        ends the run.
        """
        with self._pace.joined(self._caller.client_id):
            try:
                await self._answer_all(requests, store)
            finally:
                # Where the work breaks off, whoever goes on sends these again.
                for _, coming in self._begun:
                    coming.cancel()
                await asyncio.gather(*(one for _, one in self._begun), return_exceptions=True)

    async def _answer_all(self, requests: Iterator[BackgroundRequest], store: Store) -> None:
        waiting: deque[BackgroundRequest] = deque()
        has_more = True
        while has_more or waiting or self._begun or self._answers:
            while self._begun and self._begun[0][1].done():
                request, coming = self._begun.popleft()
                if coming.cancelled():
                    self._answers.append(BackgroundAnswer(request.unanswered(self.why_not)))
                else:
                    self._answers.append(coming.result())
            is_last = not (has_more or waiting or self._begun)
            if self._answers and self._has_room() and (is_last or self._is_time_to_store()):
                await self._store(store)
            if has_more and not waiting:
                # In a thread: it takes long to read and check them.
                waiting.extend(await self._threads.run(list, islice(requests, READ_AT_ONCE)))
                has_more = bool(waiting)
            if not self._begin_next(waiting):
                if not (self._begun and self._begun[0][1].done()):
                    await wait_for_event(self._changed, POLL_S)
                self._changed.clear()

    async def _store(self, store: Store) -> None:
        """Store the answers, later where the disk has no room now."""
        now = asyncio.get_running_loop().time
        try:
            await self._threads.run(store, self._answers)
        except DiskNearlyFull:
            logger.warning("answers wait for room on the disk: %s", self._caller.resource_id)
            self._has_room_at = now() + ROOM_PAUSE_S
            return
        self._answers = []
        self._stored_at = now()

    def _has_room(self) -> bool:
        return asyncio.get_running_loop().time() >= self._has_room_at

    def _begin_next(self, waiting: "deque[BackgroundRequest]") -> bool:
        """Begin the next request if it may begin; returns whether it did."""
        if not waiting or len(self._begun) + len(self._answers) >= BEGUN_AT_MOST:
            return False
        if self.why_not:
            coming = asyncio.get_running_loop().create_future()
            coming.cancel()
            self._begun.append((waiting.popleft(), coming))
            return True
        if self._pace.is_draining or not self._has_room():
            return False
        ended = (one for _, one in self._begun if one.done() and not one.cancelled())
        held = sum(len(one.result().content) for one in ended)
        running = sum(not one.done() for _, one in self._begun)
        may_start = self._pace.may_start
        if held >= HELD_AT_MOST_BYTES or not may_start(self._caller.client_id, running):
            return False
        request = waiting.popleft()
        task = asyncio.create_task(
            answer(self._new_context, self._caller, request, self._timing.retry_after_s)
        )
        task.add_done_callback(lambda _: self._pace.ended())
        task.add_done_callback(lambda _: self._changed.set())
        self._begun.append((request, task))
        return True

    def _is_time_to_store(self) -> bool:
        if self._pace.is_draining or len(self._answers) >= BEGUN_AT_MOST // 2:
            return True
        if sum(len(one.content) for one in self._answers) >= STORED_AT_BYTES:
            return True
        since, timing = asyncio.get_running_loop().time() - self._stored_at, self._timing
        is_enough = len(self._answers) >= timing.enough and since >= timing.soon_s
        return is_enough or since >= timing.late_s
