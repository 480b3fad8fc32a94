"""Periodic work on API keys: stores when each was used, and renews the first key before it expires."""

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from tuneship.service.access.api_keys import Keys, write_credentials

# A kill loses the uses of so many seconds, which `last_used_at`, exact to a minute, hardly shows.
EVERY_S = 10.0
RENEW_EVERY = timedelta(hours=1)


class KeyKeeper:
    """Does the work that is due by the clock."""

    def __init__(
        self, keys: Keys, credentials: Path, base_url: str, clock: Callable[[], datetime]
    ) -> None:
        """`credentials`: the file of the first key."""
        self._keys = keys
        self._credentials = credentials
        self._base_url = base_url
        self._clock = clock
        self._renew_at = clock()

    def run_due(self) -> None:
        """Store uses, and once an hour renew the first key if it is due."""
        self._keys.store_uses()
        now = self._clock()
        if now >= self._renew_at:
            write_credentials(self._keys, self._credentials, self._base_url, now)
            self._renew_at = now + RENEW_EVERY
