"""Publishes the records of this process: to the service, where people follow a release and answer its questions, and
to the terminal of a script.

One thread sends what a `Journal` has written. The service says how far it has each record, so the thread keeps nothing
on the disk: after an outage, a crash or a lost answer it goes on from there. The record stays the truth, and nothing
here stops or slows a release.
"""

import atexit
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from prefect.logging import get_logger

from flows.shared.links import has_console
from flows.shared.release_lines import RELEASES, announcement, batch, name_of, sendable
from tuneship.client import ApiError, Client, TuneshipError, base_url
from tuneship.contract.releases import GivenAnswer, ReleaseLines
from tuneship.prefect.connection import api, before_disconnect, open_client

TIMEOUT_S = 2.0
# Looks are sent together; every other line takes them along at once.
GATHER_S = 2.0
# At the end of the process.
FINISH_WITHIN_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
# The service is older than releases, or the key lacks their scope.
NOT_OFFERED = (403, 404, 405)
# As a rollout's record writes them; its texts cannot hold this, because their quotes are escaped.
_CAN_WAIT = ('"kind":"look"', '"kind":"probed"')
# The guard sends records that nobody has written to for a minute, of the last day, if the newest releases lack lines.
QUIET, RECENT, NEWEST = timedelta(minutes=1), timedelta(days=1), 200
_LOG = get_logger("tuneship.releases")


class Follower(Protocol):
    """Somebody in this process who follows its records, as the service does."""

    def line(self, fact: dict[str, Any], is_release: bool) -> None:
        """Take a line of a release's own record, or of a rollout's; it holds what `sendable` lets out."""
        ...

    def page(self, url: str) -> None:
        """Take the address of the console's page of the release."""
        ...


@dataclass
class _PublishedRecord:
    """One record: how many bytes of it are written and sent, and the moment at which the rest goes."""

    path: Path
    due: float
    written: int = 0
    sent: int = 0
    next_line: int = 1
    name: str = ""
    release_id: str | None = None
    is_refused: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether there is anything to send."""
        return self.sent < self.written and not self.is_refused

    def lines(self, start: int = 0) -> Sequence[bytes]:
        """The lines from this byte on. Raises OSError."""
        with self.path.open("rb") as file:
            file.seek(start)
            # Not what another process is writing: a full disk may take it back.
            return file.read(self.written - start).split(b"\n")[:-1]

    def move_to(self, line: int) -> None:
        """Go on with this line, or where the known ones end. Raises OSError."""
        before = self.lines()[: line - 1]
        self.next_line = len(before) + 1
        self.sent = sum(len(one) + 1 for one in before)


@dataclass(frozen=True)
class _News:
    path: Path
    length: int
    can_wait: bool


class ReleaseSender(threading.Thread):
    """The thread that sends records to one service. It ends where the service takes none."""

    def __init__(self, client: Client) -> None:
        """Prepare the thread; `news` takes what was written, and an event to be set once all is sent; None ends it."""
        super().__init__(name="release-events", daemon=True)
        self.client = client
        self.news: queue.SimpleQueue[_News | threading.Event | None] = queue.SimpleQueue()
        self.records: dict[Path, _PublishedRecord] = {}
        self._is_over = False
        self._pause_s = 0.0
        self._not_before = 0.0

    def run(self) -> None:
        """Send what is written until the process ends."""
        while not self._is_over:
            asked = self._hear()
            now = time.monotonic()
            if asked or now >= self._not_before:
                for record in [one for one in self.records.values() if one.is_waiting]:
                    if (asked or record.due <= now) and not self._is_settled(record):
                        break
            for event in asked:
                event.set()

    def _hear(self) -> list[threading.Event]:
        """Wait for news, or for the next moment to send. Returns the events of those who wait for the end."""
        dues = [one.due for one in self.records.values() if one.is_waiting]
        asked: list[threading.Event] = []
        with suppress(queue.Empty):
            wait_s = max(min(dues), self._not_before) - time.monotonic() if dues else None
            news = self.news.get(timeout=None if wait_s is None else max(0.0, wait_s))
            while True:
                if news is None:
                    self._is_over = True
                elif isinstance(news, threading.Event):
                    asked.append(news)
                else:
                    self._note(news)
                news = self.news.get_nowait()
        return asked

    def _note(self, news: _News) -> None:
        now = time.monotonic()
        record = self.records.setdefault(news.path, _PublishedRecord(news.path, now))
        due = now + GATHER_S if news.can_wait else now
        record.due = min(record.due, due) if record.is_waiting else due
        record.written = max(record.written, news.length)

    def _is_settled(self, record: _PublishedRecord) -> bool:
        """Send what is left of a record; False where the service is away, and later tries may succeed."""
        try:
            self._send(record)
        except ApiError as error:
            if error.status in NOT_OFFERED:
                _LOG.warning("the service takes no records of releases (%s)", error.sent_code)
                self._is_over = True
                return False
            if error.retryable:
                return self._pause(error)
            self._refuse(record, error.sent_code)
        except TuneshipError as error:
            return self._pause(error)
        except RuntimeError:
            # The client is closed: the process ends, or works with another service.
            self._is_over = True
            return False
        except Exception as error:  # noqa: BLE001 - the record is kept here, and no copy of it may stop a release
            self._refuse(record, type(error).__name__)
        self._pause_s = self._not_before = 0.0
        return True

    def _pause(self, error: TuneshipError) -> bool:
        if not self._pause_s:
            _LOG.info("records of releases are sent later (%s)", type(error).__name__)
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
        self._not_before = time.monotonic() + self._pause_s
        return False

    def _refuse(self, record: _PublishedRecord, why: str) -> None:
        record.is_refused = True
        _LOG.warning("the service does not get the rest of %s (%s)", record.path.name, why)

    def _send(self, record: _PublishedRecord) -> None:
        if record.release_id is None:
            self._announce(record)
        rest = record.lines(record.sent)
        while rest:
            lines = batch(rest)
            body = ReleaseLines(
                record=record.name,
                first_line=record.next_line,
                lines=[sendable(record.path, line) for line in lines],
            )
            had, sent = record.next_line, len(lines)
            try:
                reply = _briefly(self.client).releases.add_lines(str(record.release_id), body)
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
                # The service may lack what it had, e.g. since it was restored from a backup.
                self._announce(record)
                if record.next_line >= had:
                    raise
                rest = record.lines(record.sent)
                continue
            if reply.next_line == had + sent:
                record.next_line = reply.next_line
                record.sent += sum(len(line) + 1 for line in lines)
                rest = rest[sent:]
            elif reply.next_line > had:  # another process has sent more
                record.move_to(reply.next_line)
                rest = record.lines(record.sent)
            else:
                raise ValueError("the service does not continue")
        if record.is_waiting:
            raise ValueError("the file has lost lines")

    def _announce(self, record: _PublishedRecord) -> None:
        first = record.lines()[0]
        release = _briefly(self.client).releases.create(announcement(record.path, first))
        if _followers and release.id != record.release_id:
            _let_open(self.client, release.id)
        record.name, record.release_id = name_of(record.path, first), release.id
        record.move_to(release.records.get(record.name, 1))


# The sender of this process, once something was written.
_senders: list[ReleaseSender] = []
_followers: list[Follower] = []
# The records of which they know the beginning.
_followed: set[Path] = set()


def follow(follower: Follower) -> None:
    """Let somebody follow the records that this process writes from now on, each from its beginning."""
    _followers.append(follower)


def _let_follow(path: Path, lines: Sequence[str]) -> None:
    try:
        known = path in _followed
        _followed.add(path)
        for line in [one.encode() for one in lines] if known else path.read_bytes().splitlines():
            fact = sendable(path, line)
            for follower in _followers:
                follower.line(fact, path.parent.name == RELEASES)
    except Exception as error:  # noqa: BLE001 - nobody who follows a release may stop it
        _LOG.warning("a record is not followed here (%s)", type(error).__name__)


def _let_open(client: Client, release_id: str) -> None:
    try:
        if has_console(client.settings):
            for follower in _followers:
                follower.page(f"{base_url(client.settings.url)}/console/releases/{release_id}")
    except Exception as error:  # noqa: BLE001 - as above
        _LOG.warning("the page of a release is not shown here (%s)", type(error).__name__)


def publish(path: Path, length: int, lines: Sequence[str]) -> None:
    """Note that a record has these new lines, and this length with them. Never waits and never raises."""
    if _followers:
        _let_follow(path, lines)
    client = open_client()
    if client is None:
        return
    sender = next(iter(_senders), None)
    if sender is None or sender.client is not client:
        sender = ReleaseSender(client)
        with suppress(RuntimeError):  # the interpreter is ending
            sender.start()
        for former in _senders:
            former.news.put(None)
        _senders[:] = [sender]
    can_wait = all(any(kind in line for kind in _CAN_WAIT) for line in lines)
    if sender.is_alive():
        sender.news.put(_News(path, length, can_wait))


@atexit.register
def finish() -> None:
    """Send what is left, within two seconds; the guard, or the next run, sends the rest."""
    for sender in _senders:
        if sender.is_alive():
            done = threading.Event()
            sender.news.put(done)
            done.wait(FINISH_WITHIN_S)


@before_disconnect
def _end() -> None:
    for sender in _senders:
        sender.news.put(None)
        if sender.is_alive():
            sender.join(FINISH_WITHIN_S)


def publish_left(paths: Iterable[Path], now: datetime) -> None:
    """Send what ended processes have left in these records. Never raises."""
    try:
        left: list[tuple[Path, bytes]] = []
        for path in paths:
            with suppress(OSError):  # a link that leads nowhere, or a file that was moved away
                age = now.timestamp() - path.stat().st_mtime
                if QUIET.total_seconds() <= age <= RECENT.total_seconds():
                    left.append((path, path.read_bytes()))
        if not left:
            return
        releases = islice(_briefly(api()).releases.iterate(limit=100), NEWEST)
        known = {name: line for one in releases for name, line in one.records.items()}
        for path, content in left:
            name = name_of(path, content.partition(b"\n")[0])
            if known.get(name, 1) <= content.count(b"\n"):
                publish(path, content.rfind(b"\n") + 1, [""])
    except Exception as error:  # noqa: BLE001 - the guard has more important work
        _LOG.info("records of ended runs are sent later (%s)", type(error).__name__)


def takes_answers() -> bool:
    """Whether the service has releases, and shows them to this key. Raises `TuneshipError`."""
    try:
        api().releases.list(limit=1)
    except ApiError as error:
        if error.status in NOT_OFFERED:
            return False
        raise
    return True


def given_answer(path: Path, question: str) -> GivenAnswer | None:
    """The answer that a person gave in the service to a question of this record; None without one. Never raises."""
    record = _senders[0].records.get(path) if _senders else None
    if record is None or record.release_id is None:
        return None
    try:
        asked = _briefly(api()).releases.get(record.release_id).question
    except TuneshipError:
        return None
    return asked.answer if asked is not None and asked.id == question else None


def _briefly(client: Client) -> Client:
    """The client with one short try for each call."""
    ends_at = time.monotonic() + TIMEOUT_S
    return client.with_options(tries=1, timeout_s=TIMEOUT_S, ends_at=ends_at)
