"""The delivery loop: attempts the deliveries that are due, at most two at a time for each receiver.

It is level-triggered like the supervisor: the rows say what is due, and memory holds only what is in flight. After
`kill -9` a delivery whose outcome was not recorded is due again, with the same `webhook-id`, so each is delivered at
least once. A slow receiver does not delay others.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tuneship.contract.events import event
from tuneship.contract.openai.webhooks import OPENAI_PROFILE, openai_event
from tuneship.events.attempt import DeliveryOutcome, Sender
from tuneship.events.retry_schedule import WAITS, next_try
from tuneship.events.signing import signed_headers
from tuneship.host.thread_pools import Threads
from tuneship.host.ticks import IDLE_TICK_S, Ticks
from tuneship.security.vault import SealBroken, Vault
from tuneship.store.database.database import Database
from tuneship.store.database.tables import WebhookRow
from tuneship.store.records import webhook_records
from tuneship.store.records.webhook_records import FAILING, GONE, Due

logger = logging.getLogger(__name__)

# The shortest time between two looks at the rows; it bounds what one receiver gets to 200 events a second.
SHORTEST_PAUSE_S = 0.01
# Attempts in flight for one receiver.
IN_FLIGHT = 2
# Attempts in flight in all, since each holds a socket. Healthy receivers come first. No tenant may use more places than
# are still free, and a tenant without an attempt in flight always gets one.
MAX_IN_FLIGHT = 256
# The longest pause before a failed write is retried. Until the outcome is recorded, its delivery takes
# one of the receiver's places.
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class DeliveryTiming:
    """How long deliveries wait for receivers and for our own database."""

    # The wait before each attempt; there are as many attempts.
    waits: Sequence[timedelta] = WAITS
    # How long a shutdown waits for attempts in flight; the others are due again after the restart.
    drain_s: float = 5.0
    # The longest pause between two looks at the rows; when they change they are looked at sooner.
    look_every_s: float = IDLE_TICK_S
    # The pause before a failed read or write of ours is retried. For a write it doubles at each failure,
    # up to `LONGEST_PAUSE_S`.
    record_again_s: float = 1.0


class Deliverer:
    """Attempts due deliveries until it is cancelled."""

    def __init__(
        self,
        database: Database,
        vault: Vault,
        sender: Sender,
        clock: Callable[[], datetime],
        draw: Callable[[], float],
        timing: DeliveryTiming | None = None,
    ) -> None:
        """Use `draw`, which returns random numbers in [0, 1), for the jitter."""
        self._database = database
        self._vault = vault
        self._sender = sender
        self._clock = clock
        self._draw = draw
        self._timing = timing or DeliveryTiming()
        # Ids of the events in flight, by webhook.
        self._busy: dict[str, set[str]] = {}
        # Events in flight, by tenant.
        self._tenants: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        every_s = self._timing.look_every_s
        self._ticks = Ticks(every_s, every_s, SHORTEST_PAUSE_S)
        self._threads = Threads("webhook deliveries", 4)

    async def run(self) -> None:
        """Run until cancelled; then give the attempts in flight some time to end."""
        try:
            with self._database.listening(self._ticks.wake):
                await self._ticks.repeat(self._look)
        finally:
            if self._tasks:
                _, late = await asyncio.wait(self._tasks, timeout=self._timing.drain_s)
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)

    async def _look(self) -> None:
        """Start the attempts that are due."""
        busy = {webhook_id: frozenset(ids) for webhook_id, ids in self._busy.items()}
        try:
            due_now = await self._threads.run(self._find, busy, Counter(self._tenants))
        except Exception:  # e.g. the database does not answer: the next tick tries again
            logger.exception("due webhook deliveries could not be read")
            await asyncio.sleep(self._timing.record_again_s)
            return
        for due in due_now:
            webhook_id, event_id = due.key
            self._busy.setdefault(webhook_id, set()).add(event_id)
            self._tenants[due.webhook["client_id"]] += 1
            task = asyncio.create_task(self._deliver(due))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _find(self, busy: Mapping[str, frozenset[str]], tenants: Counter[str]) -> list[Due]:
        """Read the deliveries to start now, beside those in flight: `busy` by webhook, `tenants` by tenant."""
        now, chosen = self._clock(), list[Due]()
        with self._database.read() as connection:
            for webhook in webhook_records.webhooks_with_due(connection, now):
                ids = busy.get(webhook["id"], frozenset[str]())
                client = webhook["client_id"]
                own, left = tenants[client], MAX_IN_FLIGHT - tenants.total()
                share = max(math.ceil((left - own) / 2), 1 - own)
                limit = min(IN_FLIGHT - len(ids), share)
                if limit > 0:
                    found = webhook_records.next_due(connection, webhook, now, ids, limit)
                    tenants[client] += len(found)
                    chosen += found
        return chosen

    async def _deliver(self, due: Due) -> None:
        """Attempt one delivery and record its outcome."""
        webhook_id, event_id = due.key
        try:
            try:
                outcome = await self._attempt(due)
            except Exception:
                # Our own failure counts as an attempt: an event that always fails here must not be tried for ever.
                logger.exception("a webhook delivery could not be tried: %s %s", *due.key)
                outcome = DeliveryOutcome("internal_error")
            # Until it is recorded, the row is due, and the receiver would be called again.
            pause_s = self._timing.record_again_s
            while True:
                try:
                    await self._threads.run(self._record, due, outcome)
                    break
                except Exception:  # e.g. the disk is full
                    logger.exception("a webhook delivery could not be recorded: %s %s", *due.key)
                    await asyncio.sleep(pause_s)
                    pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        finally:
            self._tenants[due.webhook["client_id"]] -= 1
            self._busy[webhook_id].discard(event_id)
            if not self._busy[webhook_id]:
                del self._busy[webhook_id]
            self._ticks.wake()

    async def _attempt(self, due: Due) -> DeliveryOutcome:
        """Sign and send one event."""
        now, webhook = self._clock(), due.webhook
        in_its_form = openai_event if webhook["profile"] == OPENAI_PROFILE else event
        body = in_its_form(dict(due.event)).model_dump_json().encode()
        try:
            secrets = signing_secrets(self._vault, webhook, now)
        except SealBroken:
            text = "the secret of %s cannot be read: was the master key replaced?"
            logger.error(text, due.key[0])  # noqa: TRY400
            return DeliveryOutcome("secret_unreadable")
        headers = signed_headers(secrets, due.event["id"], int(now.timestamp()), body)
        return await self._sender.send(webhook["url"], headers, body, now)

    def _record(self, due: Due, outcome: DeliveryOutcome) -> None:
        """Store an outcome, and switch off a webhook that is gone or has failed for too long."""
        now, webhook_id = self._clock(), due.key[0]
        with self._database.write(due.webhook["client_id"]) as connection:
            if outcome.failure is None and outcome.status is not None:
                webhook_records.record_success(connection, due, outcome.status, now)
                return
            next_attempt_at = next_try(
                due.attempts + 1, now, self._draw(), outcome.retry_after, self._timing.waits
            )
            has_failed_too_long = webhook_records.record_failure(
                connection,
                due,
                now,
                next_attempt_at,
                failure=outcome.failure,
                response_status=outcome.status,
            )
            if outcome.is_gone or has_failed_too_long:
                reason = GONE if outcome.is_gone else FAILING
                webhook_records.switch_off(connection, webhook_id, reason, now)
                logger.warning("webhook switched off (%s): %s", reason, webhook_id)


def signing_secrets(vault: Vault, webhook: WebhookRow, now: datetime) -> list[str]:
    """The secrets that sign for a receiver: during a rotation, the previous one as well. Raises `SealBroken`."""
    sealed, until = [webhook["secret"]], webhook["previous_until"]
    if webhook["previous_secret"] is not None and until is not None and until > now:
        sealed.append(webhook["previous_secret"])
    return [vault.open(secret, webhook["id"]).decode() for secret in sealed]
