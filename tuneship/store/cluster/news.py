"""News between the members of a cluster: one publishes that it has committed something, the others hear it soon.

It goes by NOTIFY of Postgres, always after the commit and in a transaction of its own: inside the one that changes
something it would make all commits of the server wait for each other. News is only a hint; whoever hears none looks at
the rows a little later.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from tuneship.host.thread_pools import Threads
from tuneship.store.cluster import member_sessions
from tuneship.store.database.database import Database

CHANNEL = "tuneship"
# The topics of any change of rows, and of what is not known; the other topics are the ids of resources.
ROWS, ANYTHING = "rows", "anything"
# At most one message in this time.
PAUSE_S = 0.01
# A message that would name more says only that anything may have changed: Postgres takes 8,000 bytes.
MOST_TOPICS = 100
LISTEN_S = 0.25
AGAIN_AFTER_S = 1.0

Subscriber = Callable[[Collection[str]], None]

logger = logging.getLogger(__name__)


class News:
    """Publishes and receives news for one member while `run` runs; its open connection marks the member as alive."""

    def __init__(self, database: Database, number: int) -> None:
        """Start with nothing published and without subscribers; `number` is the member's."""
        self._database = database
        self._number = number
        self._name = uuid4().hex
        self._subscribers: list[Subscriber] = []
        self._lock = threading.Lock()
        self._unsent: set[str] = set()
        self._is_due = threading.Event()
        self._stopped = threading.Event()
        self._threads = Threads("news", 2)

    def publish(self, topic: str) -> None:
        """Let the others know, soon; call it after the commit, from any thread."""
        with self._lock:
            self._unsent.add(topic)
        self._is_due.set()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with the topics that others publish, on a thread of its own."""
        self._subscribers.append(subscriber)

    async def run(self) -> None:
        """Run until cancelled."""
        self._stopped.clear()
        try:
            works = (
                (self._listen, self._database.session_engine),
                (self._send, self._database.engine),
            )
            await asyncio.gather(*(self._threads.run(self._repeat, *work) for work in works))
        finally:
            self._stopped.set()
            self._is_due.set()
            await self._threads.finish(2 * LISTEN_S)

    def _repeat(self, work: Callable[[Any], None], engine: sa.Engine) -> None:
        """Do the work on a connection of its own, and again on a new one when it breaks."""
        while not self._stopped.is_set():
            try:
                connection = engine.raw_connection()
                try:
                    driver: Any = connection.driver_connection
                    connection.detach()
                    driver.autocommit = True
                    work(driver)
                finally:
                    connection.close()
            except Exception as error:  # noqa: BLE001 - mostly the database is away; the rows are looked at in any case
                logger.warning(
                    "the connection for messages between members is unavailable: %s",
                    type(error).__name__,
                )
                self._stopped.wait(AGAIN_AFTER_S)

    def _listen(self, connection: Any) -> None:
        connection.execute(f"listen {CHANNEL}")
        member_sessions.hold(connection, self._number)
        self._pass_on([ANYTHING])  # what was published before is not known
        while not self._stopped.is_set():
            for message in connection.notifies(timeout=LISTEN_S):
                name, topics = json.loads(message.payload)
                if name != self._name:
                    self._pass_on(topics)

    def _pass_on(self, topics: Collection[str]) -> None:
        for subscriber in self._subscribers:
            subscriber(topics)

    def _send(self, connection: Any) -> None:
        while not self._stopped.is_set():
            self._is_due.wait()
            self._is_due.clear()
            with self._lock:
                topics, self._unsent = self._unsent, set()
            if topics:
                named = sorted(topics) if len(topics) <= MOST_TOPICS else [ANYTHING]
                payload = json.dumps([self._name, named])
                connection.execute("select pg_notify(%s, %s)", (CHANNEL, payload))
                self._stopped.wait(PAUSE_S)
