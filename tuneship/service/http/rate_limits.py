"""Rate limits: fixed windows of a minute, counted in this process. Knows no HTTP framework.

Next: `shared_rate_limits.py`, where several processes count together.

Only a fixed window has a moment at which it resets, and §8 wants that moment in a header. It is counted here, by the
service's own clock, so that it is exact to the request; the event loop is its only caller.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from tuneship.contract.errors import RateLimitExceeded

WINDOW_S = 60
FAILURES_PER_MINUTE = 20
# Refusals with a time to wait that one client may cause; further ones are answered late.
REFUSALS_PER_MINUTE = 60
# Failed authentications, of all addresses together, that become rows of the audit chain, which is
# never shortened.
AUDITED_FAILURES_PER_MINUTE = 200
# Pages of one console session; each process counts its own.
PAGES_PER_MINUTE = 300
# Sign-ins to the console from one address, good ones included: each is a row of the audit chain.
SIGN_INS_PER_MINUTE = 30
# Callers that are remembered before those of past windows are forgotten.
MOST_KEPT = 10_000


@dataclass(frozen=True)
class RateWindow:
    """The state of one caller's limit in the current minute."""

    limit: int
    remaining: int
    # Epoch seconds at which the next window begins.
    reset: int
    exceeded: bool
    # Whole seconds, at least 1, after which a request passes.
    retry_after: int

    def check(self) -> None:
        """Raises `RateLimitExceeded` when the caller has used up its limit."""
        if self.exceeded:
            text = "too many requests in this minute"
            raise RateLimitExceeded(text, retry_after=self.retry_after)

    @property
    def headers(self) -> dict[str, str]:
        """The three headers of §8."""
        return {
            "X-RateLimit-Limit": str(self.limit),
            "X-RateLimit-Remaining": str(self.remaining),
            "X-RateLimit-Reset": str(self.reset),
        }


class RateLimits:
    """Counts requests by client and kind, and failed authentications by source address."""

    def __init__(
        self,
        control: int,
        generate: int,
        clock: Callable[[], datetime],
        most_kept: int = MOST_KEPT,
    ) -> None:
        """`control` and `generate` are requests per minute and client; 0 turns a limit off."""
        self._limits = {"control": control, "generate": generate}
        self._clock = clock
        # The end of a caller's window and the requests in it.
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}
        self._most_kept = self._room = most_kept

    def count(self, client_id: str, kind: str) -> RateWindow | None:
        """Count a request of `kind`; None when that limit is off."""
        limit = self._limits[kind]
        return None if limit == 0 else self._hit(kind, client_id, limit)

    async def counted(self, client_id: str, kind: str) -> RateWindow | None:
        """As `count`; where several processes count together it may have to wait for the others."""
        return self.count(client_id, kind)

    def take_spare(self, client_id: str) -> bool:
        """Count a generation that nobody waits for, unless the client has used half of its limit; False if it has."""
        limit = self._limits["generate"]
        if limit and self._window("generate", client_id, limit).remaining <= limit // 2:
            return False
        self.count(client_id, "generate")
        return True

    def failures(self, source: str) -> RateWindow:
        """The window of an address's failed authentications."""
        return self._window("failed", source, FAILURES_PER_MINUTE)

    def count_failure(self, source: str) -> RateWindow:
        """Count a failed authentication."""
        return self._hit("failed", source, FAILURES_PER_MINUTE)

    def count_audited_failure(self) -> bool:
        """Count a failure for the audit chain and return whether it may still be recorded in this minute."""
        return not self._hit("failed, all", "", AUDITED_FAILURES_PER_MINUTE).exceeded

    def count_page(self, session: str) -> RateWindow:
        """Count a page of a console session."""
        return self._hit("pages", session, PAGES_PER_MINUTE)

    def count_sign_in(self, source: str) -> RateWindow:
        """Count an attempt to sign in to the console."""
        return self._hit("sign-ins", source, SIGN_INS_PER_MINUTE)

    def count_refusal(self, client_id: str) -> bool:
        """Count a refusal with a time to wait and return whether the client had too many in this minute."""
        return self._hit("refused", client_id, REFUSALS_PER_MINUTE).exceeded

    def _hit(self, kind: str, caller: str, limit: int) -> RateWindow:
        before = self._window(kind, caller, limit)
        if before.remaining == 0:
            return before
        if len(self._counts) >= self._room:
            # Forget the windows that ended before the present one began.
            old_end = before.reset - WINDOW_S
            self._counts = {who: kept for who, kept in self._counts.items() if kept[0] > old_end}
            self._room = max(self._most_kept, 2 * len(self._counts))
        self._counts[kind, caller] = (before.reset, limit - before.remaining + 1)
        return RateWindow(limit, before.remaining - 1, before.reset, False, before.retry_after)

    def _window(self, kind: str, caller: str, limit: int) -> RateWindow:
        reset, retry_after = self._end(kind, caller)
        end, number = self._counts.get((kind, caller), (reset, 0))
        remaining = limit - number if end == reset else limit
        return RateWindow(limit, remaining, reset, remaining == 0, retry_after)

    def _end(self, kind: str, caller: str) -> tuple[int, int]:
        """The end of a caller's current window as epoch seconds, and the whole seconds until then."""
        now = self._clock().timestamp()
        # Each caller's windows begin at a second of its own, so that not all come back together.
        offset = zlib.crc32(f"{kind} {caller}".encode()) % WINDOW_S
        reset = (math.floor(now - offset) // WINDOW_S + 1) * WINDOW_S + offset
        return reset, max(1, math.ceil(reset - now))
