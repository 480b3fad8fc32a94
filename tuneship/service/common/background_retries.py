"""What background work could not do, by name: how often in turn, when it is tried again, and when it is given up.

Kept in memory: a restart, which may have mended the cause, begins to count again. A database that is away is nobody's
fault, so it is waited for, and nothing is given up for it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from tuneship.store.database import is_away

TRIES = 5
# Between two tries; the first pause is a second.
LONGEST_PAUSE = timedelta(seconds=30)


class GivenUp(Exception):
    """Says to the owner of what was tried that it is not tried again, and no more of the error than its kind."""


@dataclass(frozen=True)
class _Trouble:
    in_turn: int
    counted: int
    since: datetime
    until: datetime
    kind: str


class BackgroundRetries:
    """May be used from any thread."""

    def __init__(self, clock: Callable[[], datetime], tries: int = TRIES) -> None:
        """Nothing has failed yet."""
        self._clock = clock
        self._tries = tries
        self._by_name: dict[str, _Trouble] = {}

    def add(self, name: str, error: Exception, *, counts: bool = True) -> int:
        """It has failed once more; answers how often, as far as it counts. `counts`: not for what passes by itself."""
        before, now = self._by_name.get(name), self._clock()
        in_turn, counted = (before.in_turn, before.counted) if before else (0, 0)
        counted += counts and not is_away(error)
        pause = min(LONGEST_PAUSE, timedelta(seconds=2 ** min(in_turn, 10)))
        if counted == self._tries and before and counted > before.counted:
            pause = timedelta()  # it is only left to say so
        self._by_name[name] = _Trouble(in_turn + 1, counted, now, now + pause, kind_of(error))
        return counted

    def end(self, name: str) -> None:
        """It has succeeded."""
        self._by_name.pop(name, None)

    def keep_only(self, names: Collection[str]) -> None:
        """The others are gone."""
        for name in self._by_name.keys() - names:
            self._by_name.pop(name, None)

    def is_waiting(self, name: str) -> bool:
        """Whether its pause lasts; not when the clock was set back."""
        trouble = self._by_name.get(name)
        return trouble is not None and trouble.since <= self._clock() < trouble.until

    def waiting(self) -> list[str]:
        """Those whose pause lasts."""
        return [name for name in list(self._by_name) if self.is_waiting(name)]

    def given_up(self, name: str) -> GivenUp | None:
        """Why it is not worth another try, if so."""
        trouble = self._by_name.get(name)
        if trouble is None or trouble.counted < self._tries:
            return None
        return GivenUp(
            f"{trouble.counted} tries ended with an internal error ({trouble.kind}); the operator finds more in the "
            "service's log"
        )


def kind_of(error: Exception) -> str:
    """What the owner of a thing may know of an error: its text may hold paths."""
    words = error.strerror if isinstance(error, OSError) else None
    return words or type(error).__name__
