"""Counts failures of background work by name, with a growing pause before each retry, until the work is given up.

Kept in memory: a restart, which may have removed the cause, starts the count again. While the database or the store of
files is away nothing is given up, since that is no fault of the work.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from tuneship.agents.launchers import CannotLaunch
from tuneship.host.disk_space import DiskNearlyFull
from tuneship.replicas.replica_link import FilesAway
from tuneship.store.database.database import is_away
from tuneship.store.files.blobs import BlobsAway

TRIES = 5
# Pauses double from one second up to this.
LONGEST_PAUSE = timedelta(seconds=30)


class GivenUp(Exception):
    """The work will not be tried again. The text names only the kind of the last error."""


@dataclass(frozen=True)
class _Failure:
    consecutive: int
    counted: int
    since: datetime
    until: datetime
    kind: str


class BackgroundRetries:
    """The failures of one kind of work. May be used from any thread."""

    def __init__(self, clock: Callable[[], datetime], tries: int = TRIES) -> None:
        """Start without failures; work is given up after `tries` of them."""
        self._clock = clock
        self._tries = tries
        self._by_name: dict[str, _Failure] = {}

    def add(self, name: str, error: Exception, *, counts: bool = True) -> int:
        """Note a failure and return the number of counted ones; `counts` is false for a failure that passes by
        itself.
        """
        before, now = self._by_name.get(name), self._clock()
        consecutive, counted = (before.consecutive, before.counted) if before else (0, 0)
        counted += counts and not passes_by_itself(error)
        pause = min(LONGEST_PAUSE, timedelta(seconds=2 ** min(consecutive, 10)))
        if counted == self._tries and before and counted > before.counted:
            pause = timedelta()  # there is no retry to wait for: the owner only has to hear of it
        kind = error_kind(error)
        self._by_name[name] = _Failure(consecutive + 1, counted, now, now + pause, kind)
        return counted

    def end(self, name: str) -> None:
        """Forget the failures of work that has succeeded."""
        self._by_name.pop(name, None)

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all other work."""
        for name in self._by_name.keys() - names:
            self._by_name.pop(name, None)

    def is_waiting(self, name: str) -> bool:
        """Whether the pause before the retry lasts; it ends when the clock was set back."""
        failure = self._by_name.get(name)
        return failure is not None and failure.since <= self._clock() < failure.until

    def waiting(self) -> list[str]:
        """The names whose pause is not over."""
        return [name for name in list(self._by_name) if self.is_waiting(name)]

    def given_up(self, name: str) -> GivenUp | None:
        """Why the work is not worth a retry; None while it is."""
        failure = self._by_name.get(name)
        if failure is None or failure.counted < self._tries:
            return None
        return GivenUp(
            f"{failure.counted} attempts ended with an internal error ({failure.kind}); the operator finds more in the "
            "service's log"
        )


def passes_by_itself(error: Exception) -> bool:
    """Whether the failure is an absent database, file store or disk space, and so not the fault of the work."""
    return is_away(error) or isinstance(error, (BlobsAway, CannotLaunch, DiskNearlyFull, FilesAway))


def error_kind(error: Exception) -> str:
    """The part of an error that a tenant may see: the full text may hold paths."""
    words = error.strerror if isinstance(error, OSError) else None
    return words or type(error).__name__
