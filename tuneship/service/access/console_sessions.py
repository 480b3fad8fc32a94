"""Sessions of the console, and the links that start one. Knows no HTTP framework.

A cookie is 32 random bytes, of which only a digest is stored, as with API keys. A session can do what its key can do at
this moment, and ends with it. Somebody who signs in by OpenID Connect gets a key that has no secret, so that such a
session is like any other.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from ipaddress import ip_address
from urllib.parse import urlsplit

import sqlalchemy as sa

from tuneship.contract.errors import AuthenticationError
from tuneship.service.access.api_keys import Keys, Principal
from tuneship.settings import ServiceSettings
from tuneship.store.database.database import Database
from tuneship.store.records import session_records
from tuneship.store.records.audit import NOBODY, AuditRecord, Chain, Person

LINK_LIFETIME = timedelta(minutes=10)
# A use is noted at most once in this time, and stored some seconds later. `log-off.js` tells of uses as often.
USE_GRAIN = timedelta(seconds=60)
# Scopes of a session that "looks only" end so.
READING = ":read"
ENDED = "the console session has ended"


@dataclass(frozen=True)
class SessionRules:
    """How long sessions last, and where links may be used."""

    # Without a page or a form; an open page is no use.
    idle: timedelta
    whole: timedelta
    # A link to a loopback address is for this machine. A member of a cluster cannot know where a request comes from.
    is_alone: bool

    @property
    def grain(self) -> timedelta:
        """How long a use is not noted again, so that a short session does not end under somebody's hands."""
        return min(USE_GRAIN, self.idle / 4)


def session_rules(settings: ServiceSettings) -> SessionRules:
    """The rules of an installation."""
    idle = timedelta(minutes=settings.console_idle_minutes)
    return SessionRules(idle, timedelta(hours=settings.console_hours), settings.cluster is None)


@dataclass(frozen=True)
class Session:
    """A person who is signed in."""

    principal: Principal
    # As the person gave it, or the provider of a sign-in by OpenID Connect; empty after a link.
    name: str
    # What each form must bring back, so that no other site can send one.
    form_token: str
    # Tells an open page whether the browser still has the session of the page; no secret.
    mark: str
    looks_only: bool
    key_expires_at: datetime | None
    # How long it lasts without any use.
    idle_s: float
    # When it ends unless somebody does something, and when it ends whatever is done.
    idle_ends_at: datetime
    ends_at: datetime


@dataclass(frozen=True)
class SignInOrigin:
    """The origin of a request to sign in or out, for its audit entry."""

    address: str
    request_id: str
    # From the service's own machine.
    is_local: bool


class ConsoleSessions:
    """Signs people in and out. Every method may be called on any thread."""

    def __init__(
        self,
        database: Database,
        keys: Keys,
        secret: bytes,
        audit: tuple[Chain, Callable[[], datetime]],
        rules: SessionRules,
    ) -> None:
        """`secret` is kept outside the database; `audit` is the chain and the clock of the service."""
        self._database, self._keys, self._secret = database, keys, secret
        self._chain, self._clock = audit
        self.rules = rules
        # Tells the cookies of two installations on one host apart.
        self.installation = self._digest("installation", "").hex()[:12]
        # Uses that are not stored yet.
        self._used: dict[bytes, datetime] = {}

    def _digest(self, kind: str, text: str) -> bytes:
        return hmac.digest(self._secret, f"{kind} {text}".encode(), hashlib.sha256)

    def _proof(self, secret: str) -> str:
        return self._digest("proof", secret).hex()[:32]

    def new_link(
        self, connection: sa.Connection, client_id: str, key_id: str, service_url: str
    ) -> tuple[str, datetime]:
        """An address that signs in once, with the rights of a key, and when it expires."""
        code, expires_at = secrets.token_urlsafe(32), self._clock() + LINK_LIFETIME
        session_records.add_link(
            connection,
            {
                "digest": self._digest("link", code),
                "client_id": client_id,
                "key_id": key_id,
                "is_local": self.rules.is_alone and _is_loopback(service_url),
                "expires_at": expires_at,
            },
        )
        # In the fragment, which browsers keep for themselves.
        return f"{service_url}/console/sign-in#{code}", expires_at

    def sign_in_by_link(self, code: str, origin: SignInOrigin) -> str:
        """The cookie of a new session. Raises `AuthenticationError` for a code that is used up or expired."""
        digest, now = self._digest("link", code), self._clock()
        with self._database.write() as connection:
            link = session_records.take_link(connection, digest, now)
            if link is None or (link["is_local"] and not origin.is_local):
                # The code of a link that came to another machine is known there, so it is used up, too.
                found = None
            else:
                found = self._keys.principal_of(link["key_id"])
            if found is not None:
                return self._begin(connection, found, ("", False), origin)
        raise AuthenticationError("the link was used, has expired, or is for another machine")

    def sign_in_by_key(
        self, key: str, client_id: str, person: tuple[str, bool], origin: SignInOrigin
    ) -> str:
        """The cookie of a new session. `person`: a name, and whether they only look. Raises `AuthenticationError`."""
        principal = self._keys.authenticate([f"Bearer {key}"], [client_id])
        with self._database.write(client_id) as connection:
            return self._begin(connection, principal, person, origin)

    def sign_in_person(
        self, person: Person, client_id: str, scopes: frozenset[str], origin: SignInOrigin
    ) -> str:
        """The cookie of a new session of a person, whom a provider has named, with these rights."""
        with self._database.write(client_id) as connection:
            principal = self._keys.of_person(connection, client_id, scopes, person)
            return self._begin(connection, principal, (person.name, False), origin)

    def refuse_person(self, person: Person, origin: SignInOrigin) -> None:
        """Record that a person may not sign in."""
        with self._database.write_beside() as connection:
            self._record(connection, "sign_in", (NOBODY, "", person), origin, 403)

    def _record(
        self,
        connection: sa.Connection,
        action: str,
        who: tuple[str, str, Person | None],
        origin: SignInOrigin,
        status: int = 200,
    ) -> None:
        client_id, key_id, person = who
        self._chain.add(
            connection,
            AuditRecord(
                at=self._clock(),
                client_id=client_id,
                key_id=key_id,
                action=action,
                resource_id=None,
                status=status,
                address=origin.address,
                request_id=origin.request_id,
                person=person,
            ),
        )

    def _begin(
        self,
        connection: sa.Connection,
        principal: Principal,
        person: tuple[str, bool],
        origin: SignInOrigin,
    ) -> str:
        secret, now = secrets.token_urlsafe(32), self._clock()
        cookie = f"{secret}.{self._proof(secret)}"
        session_records.add(
            connection,
            {
                "digest": self._digest("cookie", cookie),
                "client_id": principal.client_id,
                "key_id": principal.key_id,
                "name": person[0],
                "looks_only": person[1],
                "used_at": now,
                "expires_at": now + self.rules.whole,
            },
        )
        who = principal.client_id, principal.key_id, principal.person
        self._record(connection, "sign_in", who, origin)
        return cookie

    def find(self, cookie: str, *, is_use: bool) -> Session:
        """The session of a cookie, whose use is noted if `is_use`. Raises `AuthenticationError` where it has ended."""
        digest, now = self._digest("cookie", cookie), self._clock()
        # A cookie that somebody made up must not cause a query.
        secret, _, proof = cookie.partition(".")
        if not hmac.compare_digest(proof.encode(), self._proof(secret).encode()):
            raise AuthenticationError(ENDED)
        with self._database.read() as connection:
            row = session_records.find(connection, digest)
        if row is None:
            raise AuthenticationError(ENDED)
        used_at = max(row["used_at"], self._used.get(digest, row["used_at"]))
        principal = self._keys.principal_of(row["key_id"])
        if row["expires_at"] <= now or used_at + self.rules.idle <= now or principal is None:
            raise AuthenticationError(ENDED)
        if is_use and now - used_at >= self.rules.grain:
            self._used[digest] = used_at = now
        # No session takes a tuned model away.
        scopes = principal.scopes - {"models:content"}
        if row["looks_only"]:
            scopes = frozenset(scope for scope in scopes if scope.endswith(READING))
        key_expires_at = self._keys.expiry_of(row["key_id"])
        return Session(
            principal=replace(principal, scopes=scopes),
            name=row["name"],
            form_token=self._digest("form", cookie).hex(),
            mark=self._digest("mark", cookie).hex()[:16],
            looks_only=row["looks_only"],
            key_expires_at=key_expires_at,
            idle_s=self.rules.idle.total_seconds(),
            idle_ends_at=used_at + self.rules.idle,
            ends_at=min(row["expires_at"], key_expires_at or row["expires_at"]),
        )

    def store_uses(self) -> None:
        """Store when sessions were used; a page only notes it in memory, so that it waits for no writer."""
        used = dict(self._used)
        if not used:
            return
        with self._database.write_beside() as connection:
            # In the order of the keys, so that two such transactions never wait for each other.
            for digest, moment in sorted(used.items()):
                session_records.note_use(connection, digest, moment)
        # Only now, and only these: until it is stored a use is known here alone, and pages note more meanwhile.
        for digest, moment in used.items():
            if self._used.get(digest) == moment:
                self._used.pop(digest, None)

    def end(self, cookie: str, origin: SignInOrigin) -> None:
        """Sign a person out; nothing happens where the session is gone already."""
        with self._database.write() as connection:
            row = session_records.end(connection, self._digest("cookie", cookie))
            if row is not None:
                principal = self._keys.principal_of(row["key_id"])
                person = None if principal is None else principal.person
                who = row["client_id"], row["key_id"], person
                self._record(connection, "sign_out", who, origin)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
