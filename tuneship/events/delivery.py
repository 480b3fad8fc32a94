"""The delivery loop: what the rows say is due is tried, at most two at a time for each receiver.

Level-triggered like the supervisor: it remembers only what is in the air. After `kill -9` a delivery whose result was
not written is due again, under the same `webhook-id`: at least once. One sick receiver delays nobody else.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import datetime

from tuneship.contract.events import event
from tuneship.events.attempt import DeliveryOutcome, Sender
from tuneship.events.retry_schedule import next_try
from tuneship.events.signing import signed_headers
from tuneship.host.thread_pools import Threads
from tuneship.host.waiting import wait_for_event
from tuneship.security.vault import SealBroken, Vault
from tuneship.store import webhook_records
from tuneship.store.database import Database
from tuneship.store.queries import Row
from tuneship.store.webhook_records import FAILING, GONE, Due

logger = logging.getLogger(__name__)

TICK_S = 0.2
# Tries at the same time for one receiver.
IN_FLIGHT = 2
# Tries at the same time in all: each holds a socket. Receivers without trouble come first.
TOGETHER = 256
# At shutdown, for what is in the air; the rest is due after the restart.
DRAIN_S = 5.0
# The pause after a failure of ours, which doubles until it is the longest.
RECORD_AGAIN_S, LONGEST_PAUSE_S = 1.0, 30.0


class Deliverer:
    """Sends due deliveries until it is cancelled."""

    def __init__(
        self,
        database: Database,
        vault: Vault,
        sender: Sender,
        clock: Callable[[], datetime],
        draw: Callable[[], float],
    ) -> None:
        """`draw` gives numbers in [0, 1) for the jitter."""
        self._database = database
        self._vault = vault
        self._sender = sender
        self._clock = clock
        self._draw = draw
        self._busy: dict[str, set[str]] = {}
        """Events in the air, by webhook."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._landed = asyncio.Event()
        self._threads = Threads("webhook deliveries", 4)

    async def run(self) -> None:
        """Until cancelled; then tries in the air may end."""
        try:
            while True:
                await self._tick()
                self._landed.clear()
                await wait_for_event(self._landed, TICK_S)
        finally:
            await self._drain()

    async def _drain(self) -> None:
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=DRAIN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _tick(self) -> None:
        busy = {webhook_id: frozenset(ids) for webhook_id, ids in self._busy.items()}
        try:
            found = await self._threads.run(self._find, busy)
        except Exception:  # e.g. the database is away: the next tick tries again
            logger.exception("due webhook deliveries could not be read")
            await asyncio.sleep(RECORD_AGAIN_S)
            return
        for due in found:
            webhook_id, event_id = due.key
            self._busy.setdefault(webhook_id, set()).add(event_id)
            task = asyncio.create_task(self._deliver(due))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _find(self, busy: Mapping[str, frozenset[str]]) -> list[Due]:
        now, found = self._clock(), list[Due]()
        room = TOGETHER - sum(len(ids) for ids in busy.values())
        with self._database.read() as connection:
            for webhook in webhook_records.webhooks_with_due(connection, now):
                ids = busy.get(webhook["id"], frozenset[str]())
                limit = min(IN_FLIGHT - len(ids), room - len(found))
                if limit > 0:
                    found += webhook_records.next_due(connection, webhook, now, ids, limit)
        return found

    async def _deliver(self, due: Due) -> None:
        webhook_id, event_id = due.key
        try:
            await self._record_safely(due, await self._try_safely(due))
        finally:
            self._busy[webhook_id].discard(event_id)
            if not self._busy[webhook_id]:
                del self._busy[webhook_id]
            self._landed.set()

    async def _record_safely(self, due: Due, outcome: DeliveryOutcome) -> None:
        """Until it is recorded: the row is still due, and the receiver must not be called again for that."""
        pause_s = RECORD_AGAIN_S
        while True:
            try:
                await self._threads.run(self._record, due, outcome)
            except Exception:  # e.g. the disk is full
                logger.exception("a webhook delivery could not be recorded: %s %s", *due.key)
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            else:
                return

    async def _try_safely(self, due: Due) -> DeliveryOutcome:
        """What fails here without the receiver's doing counts as a try: it would fail for ever."""
        try:
            return await self._try(due)
        except Exception:
            logger.exception("a webhook delivery could not be tried: %s %s", *due.key)
            return DeliveryOutcome("internal_error")

    async def _try(self, due: Due) -> DeliveryOutcome:
        now, body = self._clock(), event(dict(due.event)).model_dump_json().encode()
        try:
            signers = self._signers(due.webhook, now)
        except SealBroken:
            logger.error("the secret of %s cannot be read: is the master key another?", due.key[0])  # noqa: TRY400
            return DeliveryOutcome("secret_unreadable")
        headers = signed_headers(signers, due.event["id"], int(now.timestamp()), body)
        return await self._sender.send(due.webhook["url"], headers, body, now)

    def _signers(self, webhook: Row, now: datetime) -> list[str]:
        """The secret in force and, while a rotation lasts, the one before it."""
        sealed = [webhook["secret"]]
        if webhook["previous_secret"] is not None and webhook["previous_until"] > now:
            sealed.append(webhook["previous_secret"])
        return [self._vault.open(one, webhook["id"]).decode() for one in sealed]

    def _record(self, due: Due, outcome: DeliveryOutcome) -> None:
        now, webhook_id = self._clock(), due.key[0]
        with self._database.write() as connection:
            if outcome.failure is None and outcome.status is not None:
                webhook_records.delivered(connection, due, outcome.status, now)
                return
            again = next_try(due.attempts + 1, now, self._draw(), outcome.retry_after)
            what = {"failure": outcome.failure, "response_status": outcome.status}
            is_hopeless = webhook_records.failed(connection, due, now, again, **what)
            if outcome.is_gone or is_hopeless:
                reason = GONE if outcome.is_gone else FAILING
                webhook_records.switch_off(connection, webhook_id, reason, now)
                logger.warning("webhook switched off (%s): %s", reason, webhook_id)
