"""Who may ask: API keys, the tenant behind them, scopes, and the windows of the rate limit. Knows no HTTP framework."""

import base64
import hashlib
import hmac
import json
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from tuneship.contract.errors import AuthenticationError, PermissionDenied, RateLimitExceeded
from tuneship.contract.operation import DECLARED
from tuneship.store.database import Database
from tuneship.store.tables import api_keys

KEY_LENGTH = 4 + 8 + 1 + 43 + 1 + 6
LONGEST_HEADER = 256
FAILURES_PER_MINUTE = 20
FIRST_KEY_LIFETIME = timedelta(days=90)
RENEW_BEFORE = timedelta(days=30)
CACHE_SECONDS = 1.0
"""A revocation takes effect within this time."""


@dataclass(frozen=True)
class Principal:
    """An authenticated caller."""

    client_id: str
    key_id: str
    scopes: frozenset[str]

    def require(self, scope: str) -> None:
        """Raises `PermissionDenied` without the scope."""
        if scope not in self.scopes:
            raise PermissionDenied(f"this key lacks the scope {scope}")


@dataclass(frozen=True)
class RateWindow:
    """Where a caller stands in the current minute."""

    limit: int
    remaining: int
    reset: int
    """Epoch seconds."""
    exceeded: bool

    @property
    def headers(self) -> dict[str, str]:
        """The three headers of §8."""
        return {
            "X-RateLimit-Limit": str(self.limit),
            "X-RateLimit-Remaining": str(self.remaining),
            "X-RateLimit-Reset": str(self.reset),
        }


def _checksum(text: str) -> str:
    digits = zlib.crc32(text.encode()).to_bytes(4, "big")
    return base64.b32encode(digits).decode()[:6].lower()


def new_key() -> str:
    """`tsk_<id>_<secret>_<checksum>`: typos fail offline, scanners can find it."""
    identifier = secrets.token_hex(4)
    text = f"tsk_{identifier}_{secrets.token_urlsafe(32)}"
    return f"{text}_{_checksum(text)}"


def key_id(key: str) -> str | None:
    """The public part of a well-formed key."""
    if len(key) != KEY_LENGTH or not key.startswith("tsk_"):
        return None
    text, checksum = key[:-7], key[-6:]
    matches = hmac.compare_digest(checksum.encode(), _checksum(text).encode())
    return key[4:12] if matches else None


class Keys:
    """Issues keys and recognises them. Only a peppered hash is stored: the secret has 256 random bits."""

    def __init__(self, database: Database, pepper: bytes, clock: Callable[[], datetime]) -> None:
        """`pepper` lies outside the database."""
        self._database = database
        self._pepper = pepper
        self._clock = clock
        self._cache: dict[str, tuple[float, sa.RowMapping | None]] = {}

    def _hash(self, key: str) -> bytes:
        return hmac.digest(self._pepper, key.encode(), hashlib.sha256)

    def issue(self, client_id: str, scopes: frozenset[str], expires_at: datetime | None) -> str:
        """Make a key; it is shown only here."""
        key = new_key()
        with self._database.write() as connection:
            connection.execute(
                sa.insert(api_keys).values(
                    id=key_id(key),
                    client_id=client_id,
                    secret_hash=self._hash(key),
                    scopes=sorted(scopes),
                    label="",
                    created_at=self._clock(),
                    expires_at=expires_at,
                )
            )
        return key

    def recognise(self, authorization: list[str], client_ids: list[str]) -> Principal:
        """The caller behind the headers `Authorization` and `X-Client-ID`. Raises `AuthenticationError`."""
        if len(authorization) != 1 or len(client_ids) != 1:
            raise AuthenticationError("one Authorization and one X-Client-ID header are required")
        scheme, _, key = authorization[0].partition(" ")
        public = key_id(key) if scheme.lower() == "bearer" else None
        if public is None or len(authorization[0]) > LONGEST_HEADER:
            raise AuthenticationError("the Authorization header holds no API key of this service")
        row = self._row(public)
        if (
            row is None
            or not hmac.compare_digest(row["secret_hash"], self._hash(key))
            or row["client_id"] != client_ids[0]
            or row["revoked_at"] is not None
            or (row["expires_at"] is not None and row["expires_at"] <= self._clock())
        ):
            raise AuthenticationError("the API key or the client id is not valid")
        return Principal(row["client_id"], row["id"], frozenset(row["scopes"]))

    def _row(self, identifier: str) -> sa.RowMapping | None:
        moment = self._clock().timestamp()
        kept = self._cache.get(identifier)
        if kept is not None and 0 <= moment - kept[0] < CACHE_SECONDS:
            return kept[1]
        if len(self._cache) > 10_000:
            self._cache.clear()
        with self._database.read() as connection:
            query = sa.select(api_keys).where(api_keys.c.id == identifier)
            row = connection.execute(query).mappings().first()
        self._cache[identifier] = (moment, row)
        return row


def every_scope() -> frozenset[str]:
    """All scopes that a declared operation asks for."""
    return frozenset(operation.scope for operation in DECLARED)


def write_credentials(keys: Keys, file: Path, base_url: str, now: datetime) -> None:
    """The first key, for the person who started the service (0600); renewed before it expires."""
    kept: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    expires = datetime.fromisoformat(kept["expires_at"]) if kept else now
    if expires - now < RENEW_BEFORE:
        expires = now + FIRST_KEY_LIFETIME
        kept = {
            "api_key": keys.issue("local", every_scope(), expires),
            "client_id": "local",
            "expires_at": expires.astimezone(UTC).isoformat(),
        }
    write_private(file, json.dumps({**kept, "base_url": base_url}, indent=2) + "\n")


def write_private(file: Path, text: str) -> None:
    """Write a file whole, readable by its owner only."""
    temporary = file.with_suffix(".tmp")
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(file)


def read_or_make_secret(file: Path) -> bytes:
    """32 random bytes, made at the first start."""
    if not file.is_file():
        write_private(file, secrets.token_hex(32) + "\n")
    return bytes.fromhex(file.read_text().strip())


def derived_secret(master: bytes, purpose: str) -> bytes:
    """A secret for one purpose; knowing it tells nothing about the others."""
    return hmac.digest(master, purpose.encode(), hashlib.sha256)


class RateLimits:
    """Fixed windows of a minute: only they have the moment that `X-RateLimit-Reset` names."""

    def __init__(self, control: int, generate: int) -> None:
        """Requests a minute and client; 0 turns a limit off."""
        self._limiter = FixedWindowRateLimiter(MemoryStorage())
        self._limits = {"control": control, "generate": generate}

    def count(self, client_id: str, kind: str) -> RateWindow | None:
        """Count a request of `kind`; None when that limit is off."""
        limit = self._limits[kind]
        if limit == 0:
            return None
        item = RateLimitItemPerMinute(limit)
        passed = self._limiter.hit(item, kind, client_id)
        reset, remaining = self._limiter.get_window_stats(item, kind, client_id)
        return RateWindow(limit, max(0, remaining), int(reset), not passed)

    def check_source(self, address: str) -> None:
        """Refuse an address that failed to authenticate too often, before any look-up."""
        if not self._limiter.test(RateLimitItemPerMinute(FAILURES_PER_MINUTE), "failed", address):
            raise RateLimitExceeded("too many failed authentications", retry_after=60)

    def count_failure(self, address: str) -> None:
        """Count a failed authentication."""
        self._limiter.hit(RateLimitItemPerMinute(FAILURES_PER_MINUTE), "failed", address)
