"""API keys: authentication of callers, their tenants and their scopes. Knows no HTTP framework.

A change in the table, also by `tuneship keys` in another process, takes effect within `CACHE_SECONDS`.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import sqlalchemy as sa

from tuneship.contract.declaring.scopes import PRESETS
from tuneship.contract.errors import AuthenticationError
from tuneship.host.durable import write_private
from tuneship.store.database.database import Database
from tuneship.store.database.rows import Row
from tuneship.store.database.tables import ApiKeyRow
from tuneship.store.records import api_key_records
from tuneship.store.records.audit import AuditRecord, Chain, Person

logger = logging.getLogger(__name__)

# The answer does not say which of the three it is.
NOT_VALID = "the API key or the client id is not valid, or the key has expired"
# `tsk_`, the public part, `_`, 32 bytes in Base64, `_`, and the checksum.
KEY_LENGTH = 4 + 8 + 1 + 43 + 1 + 6
# A longer header holds no key, and is not searched for one.
LONGEST_HEADER = 256
# The position of the public part in a key, and in its header.
KEY_PART = slice(4, 12)
KEY_ID = slice(len("Bearer tsk_"), len("Bearer tsk_") + 8)
# The longest that the hipaa mode accepts.
FIRST_KEY_LIFETIME = timedelta(days=90)
# What a person began in the console may go on until then after the last sign-in; sessions end much earlier.
PERSON_KEY_LIFETIME = timedelta(days=30)
# No key has this hash.
NO_SECRET = b""
# People copy the key out of the file, so the old one stays good for a while after the new one is written.
RENEW_BEFORE = timedelta(days=30)
# A revocation takes effect within this time.
CACHE_SECONDS = 1.0
# How often long work looks whether its key has ended: with the cache it ends within two seconds.
LOOK_EVERY_S = 0.5
MAX_CACHED = 10_000
# `last_used_at` is updated at most this often, and stored some seconds later.
USE_GRAIN = timedelta(seconds=60)


@dataclass(frozen=True)
class Principal:
    """An authenticated caller."""

    client_id: str
    key_id: str
    scopes: frozenset[str]
    # The time from the key's creation to its expiry; None: it never expires.
    lifetime: timedelta | None = None
    # The person that the key stands for, where nobody holds its secret.
    person: Person | None = None


def _checksum(text: str) -> str:
    digits = zlib.crc32(text.encode()).to_bytes(4, "big")
    return base64.b32encode(digits).decode()[:6].lower()


def new_key() -> str:
    """A new `tsk_<id>_<secret>_<checksum>`: the checksum shows typos, the prefix lets secret scanners find it."""
    identifier = secrets.token_hex(4)
    text = f"tsk_{identifier}_{secrets.token_urlsafe(32)}"
    return f"{text}_{_checksum(text)}"


def key_id(key: str) -> str | None:
    """The public part of a key; None for text that is no key."""
    if len(key) != KEY_LENGTH or not key.startswith("tsk_"):
        return None
    text, checksum = key[:-7], key[-6:]
    matches = hmac.compare_digest(checksum.encode(), _checksum(text).encode())
    return key[KEY_PART] if matches else None


def _key_in(authorization: str) -> str | None:
    """The key in a header `Authorization: Bearer ...`."""
    scheme, _, key = authorization.partition(" ")
    is_bearer = scheme.lower() == "bearer" and len(authorization) <= LONGEST_HEADER
    return key if is_bearer else None


def is_in_force(row: Row | sa.RowMapping, moment: datetime) -> bool:
    """Whether a key is not revoked, and not expired at a moment."""
    expires: datetime | None = row["expires_at"]
    return row["revoked_at"] is None and (expires is None or expires > moment)


def _principal(row: sa.RowMapping) -> Principal:
    lifetime = None if row["expires_at"] is None else row["expires_at"] - row["created_at"]
    person = None if row["person"] is None else Person(**row["person"])
    return Principal(row["client_id"], row["id"], frozenset(row["scopes"]), lifetime, person)


class NoSuchKey(LookupError):
    """There is no key with this id."""


class KeyEnded(Exception):
    """The key was revoked or has expired."""


class KeyOfPerson(Exception):
    """The key stands for a person who signs in, and has no secret that could be replaced."""


def _found(connection: sa.Connection, identifier: str) -> ApiKeyRow:
    row = api_key_records.find(connection, identifier)
    if row is None:
        raise NoSuchKey(identifier)
    return cast("ApiKeyRow", dict(row))


class Keys:
    """Issues keys and authenticates callers. Only a peppered hash is stored: the secret has 256 random bits."""

    def __init__(
        self, database: Database, pepper: bytes, clock: Callable[[], datetime], chain: Chain
    ) -> None:
        """`pepper` is kept outside the database; `chain` records every key that is created or ended."""
        self._database = database
        self._chain = chain
        self._pepper = pepper
        self._clock = clock
        self._cache: dict[str, tuple[float, sa.RowMapping | None]] = {}
        # When the ids of all keys were last read, and the ids.
        self._issued: tuple[float, frozenset[str]] | None = None
        # How many requests at work wait for the end of a key, by its id.
        self._watched: Counter[str] = Counter()
        self._looking = asyncio.Lock()
        # When the watched keys were last read, and those of them that had ended.
        self._seen_ended: tuple[float, Collection[str]] = (0.0, ())
        self._noted: dict[str, datetime] = {}
        self._unstored: set[str] = set()

    def _hash(self, key: str) -> bytes:
        return hmac.digest(self._pepper, key.encode(), hashlib.sha256)

    def issue(
        self, client_id: str, scopes: frozenset[str], expires_at: datetime | None, label: str = ""
    ) -> str:
        """Create and return a key, which cannot be read again later."""
        with self._database.write(client_id) as connection:
            return self._issue(connection, client_id, scopes, expires_at, label)

    def _issue(
        self,
        connection: sa.Connection,
        client_id: str,
        scopes: frozenset[str],
        expires_at: datetime | None,
        label: str,
    ) -> str:
        key = new_key()
        api_key_records.add(
            connection,
            {
                "id": key_id(key),
                "client_id": client_id,
                "secret_hash": self._hash(key),
                "scopes": sorted(scopes),
                "label": label,
                "created_at": self._clock(),
                "expires_at": expires_at,
            },
        )
        self._add_audit_entry(connection, "create_key", client_id, key[KEY_PART])
        return key

    def of_person(
        self, connection: sa.Connection, client_id: str, scopes: frozenset[str], person: Person
    ) -> Principal:
        """The key that stands for a person of a tenant, made or renewed with the rights of this moment.

        It has no secret, so that it lets nobody in. What the person began ends with it, as with any other key.
        """
        now, kept = self._clock(), asdict(person)
        given = {
            "scopes": sorted(scopes),
            "label": f"signs in: {person.name}",
            "created_at": now,
            "expires_at": now + PERSON_KEY_LIFETIME,
            "person": kept,
        }
        rows = api_key_records.of_people(connection, client_id)
        same = [
            row["id"]
            for row in rows
            if is_in_force(row, now)
            and all(row["person"][name] == kept[name] for name in ("issuer", "subject"))
        ]
        identifier = same[0] if same else secrets.token_hex(4)
        if not same:
            row = {"id": identifier, "client_id": client_id, "secret_hash": NO_SECRET, **given}
            api_key_records.add(connection, row)
            self._add_audit_entry(connection, "create_key", client_id, identifier, person)
        else:
            api_key_records.change(connection, identifier, **given)
        self._cache.pop(identifier, None)
        return Principal(client_id, identifier, scopes, PERSON_KEY_LIFETIME, person)

    def _add_audit_entry(
        self,
        connection: sa.Connection,
        action: str,
        client_id: str,
        identifier: str,
        person: Person | None = None,
    ) -> None:
        # Keys are created and ended on the host, not by a request, so there is no address. That of a person is
        # in the row `sign_in`.
        what = (client_id, identifier, action, identifier, 200, "", "")
        self._chain.add(connection, AuditRecord(self._clock(), *what, person=person))

    def listed(self) -> list[Row]:
        """Every key of every client, oldest first, with the hash of its secret."""
        with self._database.read() as connection:
            return api_key_records.all_of(connection)

    def _tenant_of(self, identifier: str) -> str:
        with self._database.read() as connection:
            return _found(connection, identifier)["client_id"]

    def revoke(self, identifier: str) -> Row:
        """End a key now; a key that was revoked before is not changed. Raises `NoSuchKey`."""
        with self._database.write(self._tenant_of(identifier)) as connection:
            row = _found(connection, identifier)
            if row["revoked_at"] is None:
                now = self._clock()
                api_key_records.change(connection, identifier, revoked_at=now)
                self._add_audit_entry(connection, "revoke_key", row["client_id"], identifier)
                row = {**row, "revoked_at": now}
        return row

    def rotate(self, identifier: str, expires_at: datetime | None, overlap: timedelta) -> str:
        """Replace a key by one of the same client, scopes and label; the old one stays in force for `overlap`.

        Raises `NoSuchKey`, `KeyEnded` when the key is no longer in force, and `KeyOfPerson`.
        """
        now = self._clock()
        with self._database.write(self._tenant_of(identifier)) as connection:
            row = _found(connection, identifier)
            if not is_in_force(row, now):
                raise KeyEnded(identifier)
            if row["person"] is not None:
                raise KeyOfPerson(identifier)
            key = self._issue(
                connection, row["client_id"], frozenset(row["scopes"]), expires_at, row["label"]
            )
            if not overlap:
                api_key_records.change(connection, identifier, revoked_at=now)
            elif row["expires_at"] is None or row["expires_at"] > now + overlap:
                api_key_records.change(connection, identifier, expires_at=now + overlap)
            self._add_audit_entry(connection, "rotate_key", row["client_id"], identifier)
        return key

    def is_good_for(self, key: str, scopes: frozenset[str], until: datetime) -> bool:
        """Whether a key was issued here, has exactly these scopes and is in force until a moment."""
        row = self._row(key_id(key) or "")
        return (
            row is not None
            and hmac.compare_digest(row["secret_hash"], self._hash(key))
            and frozenset(row["scopes"]) == scopes
            and is_in_force(row, until)
        )

    def store_uses(self) -> None:
        """Store when keys were used since the last call; requests only note it in memory."""
        used = sorted(self._unstored)
        if not used:
            return
        with self._database.write_beside() as connection:
            for identifier in used:
                api_key_records.change(connection, identifier, last_used_at=self._noted[identifier])
        # Only now, and only these: after a failure all are still to be stored, and requests note more meanwhile.
        self._unstored.difference_update(used)

    def authenticate(self, authorization: list[str], client_ids: list[str] | None) -> Principal:
        """The caller behind the headers `Authorization` and `X-Client-ID`. Raises `AuthenticationError`.

        None instead of client ids: the key alone says who the caller is.
        """
        if len(authorization) != 1 or (client_ids is not None and len(client_ids) != 1):
            needed = "one Authorization and one X-Client-ID header are required"
            raise AuthenticationError(
                needed if client_ids is not None else "one Authorization header is required"
            )
        key = _key_in(authorization[0])
        public = None if key is None else key_id(key)
        if key is None or public is None:
            raise AuthenticationError("the Authorization header holds no API key of this service")
        # The hash is taken without a row, too: the time of the answer must not reveal which ids exist.
        row, now, digest = self._row(public), self._clock(), self._hash(key)
        if (
            row is None
            or not hmac.compare_digest(row["secret_hash"], digest)
            or (client_ids is not None and row["client_id"] != client_ids[0])
            or not is_in_force(row, now)
        ):
            raise AuthenticationError(NOT_VALID)
        noted = self._noted.get(public)
        # The clock may have been set back: then the time that was noted lies ahead.
        if noted is None or not timedelta(0) <= now - noted < USE_GRAIN:
            self._noted[public] = now
            self._unstored.add(public)
        return _principal(row)

    def principal_of(self, identifier: str) -> Principal | None:
        """The caller that a key stands for; None where the key was revoked or has expired."""
        row = self._row(identifier)
        return _principal(row) if row is not None and is_in_force(row, self._clock()) else None

    def expiry_of(self, identifier: str) -> datetime | None:
        """When a key expires; None if it never does."""
        row = self._row(identifier)
        return None if row is None else row["expires_at"]

    async def wait_until_ended(self, identifier: str) -> None:
        """Return when a key was revoked or has expired. All who wait share one query a second."""
        self._watched[identifier] += 1
        try:
            while identifier not in self._seen_ended[1]:
                await asyncio.sleep(LOOK_EVERY_S)
                async with self._looking:
                    if not self._is_fresh(self._seen_ended[0]):
                        await self._look_at_watched()
        finally:
            self._watched[identifier] -= 1
            if not self._watched[identifier]:
                del self._watched[identifier]

    async def _look_at_watched(self) -> None:
        moment, watched = self._clock().timestamp(), [*self._watched]
        try:
            ended = await asyncio.to_thread(self._ended_among, watched)
        except Exception as error:  # noqa: BLE001 - all streams end with this one, so it goes on
            logger.warning("keys could not be looked at: %s", type(error).__name__)
            ended = self._seen_ended[1]
        self._seen_ended = (moment, ended)

    def _ended_among(self, identifiers: Collection[str]) -> set[str]:
        with self._database.read() as connection:
            return api_key_records.ended(connection, identifiers, self._clock())

    def is_ended(self, identifier: str) -> bool:
        """Whether a key was revoked or has expired."""
        row = self._row(identifier)
        return row is None or not is_in_force(row, self._clock())

    def has_fresh_ids(self) -> bool:
        """Whether `is_issued` needs no query."""
        return self._issued is not None and self._is_fresh(self._issued[0])

    def is_issued(self, authorization: list[str]) -> bool:
        """Whether a key has the id in a header; its secret is not compared.

        All ids are read together, at most once a second, so that made-up keys do not cause a query each.
        """
        issued = self._issued
        if issued is None or not self._is_fresh(issued[0]):
            moment = self._clock().timestamp()
            with self._database.read() as connection:
                issued = moment, frozenset(api_key_records.ids_of(connection))
            self._issued = issued
        key = _key_in(authorization[0]) if authorization else None
        return key is not None and key_id(key) in issued[1]

    def is_cached(self, authorization: list[str]) -> bool:
        """Whether `authenticate` needs no query, so that it may run on the event loop."""
        kept = self._cache.get(authorization[0][KEY_ID]) if authorization else None
        return kept is not None and self._is_fresh(kept[0])

    def _is_fresh(self, moment: float) -> bool:
        return 0 <= self._clock().timestamp() - moment < CACHE_SECONDS

    def _row(self, identifier: str) -> sa.RowMapping | None:
        moment = self._clock().timestamp()
        kept = self._cache.get(identifier)
        if kept is not None and self._is_fresh(kept[0]):
            return kept[1]
        # Ids that somebody made up are cached too, as absent, so the number must have a limit.
        if len(self._cache) > MAX_CACHED:
            self._cache.clear()
        with self._database.read() as connection:
            row = api_key_records.find(connection, identifier)
        self._cache[identifier] = (moment, row)
        return row


def write_credentials(
    keys: Keys,
    file: Path,
    base_url: str,
    now: datetime,
    scopes: frozenset[str] = PRESETS["admin"],
    label: str = "credentials.json",
) -> None:
    """Write a key into a file (0600): the first key for the person who started the service, or one for a program.

    A new key replaces it there 30 days before it expires (it stays in force until then), and when it is revoked,
    belongs to another database, or has other scopes than this version gives it.
    """
    kept = read_credentials(file)
    if not keys.is_good_for(kept.get("api_key", ""), scopes, now + RENEW_BEFORE):
        expires = now + FIRST_KEY_LIFETIME
        kept = {
            "api_key": keys.issue("local", scopes, expires, label),
            "client_id": "local",
            "expires_at": expires.astimezone(UTC).isoformat(),
        }
    write_private(file, json.dumps({**kept, "base_url": base_url}, indent=2) + "\n")


def replace_credentials(file: Path, identifier: str, key: str, expires_at: datetime | None) -> None:
    """Put a rotated key into the credentials file, if the old key is in it."""
    kept = read_credentials(file)
    if key_id(kept.get("api_key", "")) == identifier:
        end = {} if expires_at is None else {"expires_at": expires_at.astimezone(UTC).isoformat()}
        kept.pop("expires_at", None)
        write_private(file, json.dumps({**kept, "api_key": key, **end}, indent=2) + "\n")


def read_credentials(file: Path) -> dict[str, str]:
    """The fields that `write_credentials` wrote; empty when the file is missing or unreadable."""
    try:
        found: object = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return cast("dict[str, str]", found) if isinstance(found, dict) else {}
