"""Asks a provider of OpenID Connect who somebody is: authorization code flow with PKCE. Knows no HTTP framework.

Everything that the provider answers is checked and bounded, and nothing of it is logged or shown but the names of
claims. Errors say in plain words what is wrong.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast
from urllib.parse import quote_plus, urlsplit

import httpx
from authlib.common.urls import add_params_to_uri

from tuneship.contract.errors import AuthenticationError, InternalError
from tuneship.host.operator_files import secret_in, trust_in
from tuneship.host.startup import StartupError
from tuneship.service.access.people_groups import GrantedRights, PeopleGroups
from tuneship.settings import ConsoleSettings
from tuneship.store.records.audit import Person

logger = logging.getLogger(__name__)

ANSWER_BYTES = 1 << 20
ANSWER_WITHIN_S = 10.0
# How long the provider's addresses and keys are used before they are read again.
FRESH_FOR = timedelta(hours=1)
# A key that is not known may be new, and is looked for at most this often.
KEYS_AT_MOST_EVERY = timedelta(minutes=1)
# A provider that did not answer is not asked by everybody at once.
AWAY_FOR = timedelta(seconds=5)
LONGEST_NAME = 64
LONGEST_SUBJECT = 255
NAMES = ("name", "preferred_username", "email", "sub")
ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")
MORE_ENDPOINTS = ("userinfo_endpoint", "end_session_endpoint")


@dataclass(frozen=True)
class BegunSignIn:
    """The secrets that tie an answer of the provider to the browser that asked for it."""

    state: str
    nonce: str
    verifier: str


@dataclass(frozen=True)
class _Provider:
    """The provider, as it described itself."""

    metadata: Mapping[str, Any]
    # What `id_tokens.py` has made of them.
    keys: Any
    read_at: datetime


class OpenId:
    """Signs people in with one provider."""

    def __init__(
        self, settings: ConsoleSettings, redirect_uri: str, clock: Callable[[], datetime]
    ) -> None:
        """`redirect_uri`: where the provider sends people back to. Raises `StartupError`."""
        self._settings, self._redirect_uri, self._clock = settings, redirect_uri, clock
        if settings.oidc_groups_file is None:
            raise StartupError("TUNESHIP_OIDC_GROUPS_FILE is missing")
        self._groups = PeopleGroups(settings.oidc_groups_file)
        self._tls = trust_in(settings.oidc_ca_file, "TUNESHIP_OIDC_CA_FILE")
        self._secret = None
        if (file := settings.oidc_client_secret_file) is not None:
            self._secret = secret_in(file, "TUNESHIP_OIDC_CLIENT_SECRET_FILE")
        from tuneship.service.access import id_tokens  # noqa: PLC0415 - only where people sign in so

        self._tokens = id_tokens
        self._provider: _Provider | None = None
        self._away_at: datetime | None = None
        self._reading = asyncio.Lock()

    async def begin(self) -> tuple[str, BegunSignIn]:
        """The provider's address for a new sign-in, and the secrets for its end. Raises `InternalError` (503)."""
        provider = await self._found()
        begun = BegunSignIn(*(secrets.token_urlsafe(32) for _ in range(3)))
        query = {
            "response_type": "code",
            "client_id": self._settings.oidc_client_id,
            "redirect_uri": self._redirect_uri,
            "scope": " ".join(("openid", *self._settings.oidc_scopes)),
            "state": begun.state,
            "nonce": begun.nonce,
            "code_challenge": self._tokens.challenge_of(begun.verifier),
            "code_challenge_method": "S256",
        }
        address = provider.metadata["authorization_endpoint"]
        return add_params_to_uri(address, [*query.items()]), begun

    async def finish(self, code: str, begun: BegunSignIn) -> tuple[Person, GrantedRights | None]:
        """The person behind a code, and the rights, None without any.

        Raises `AuthenticationError` for a code or token that is refused, and `InternalError` (503).
        """
        provider = await self._found()
        metadata, settings = provider.metadata, self._settings
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "code_verifier": begun.verifier,
        }
        options: dict[str, Any] = {"data": form}
        methods = metadata.get("token_endpoint_auth_methods_supported")
        # As the provider says, or else as every provider must know it.
        is_basic = "client_secret_basic" in methods if isinstance(methods, list) else True
        if self._secret is not None and is_basic:
            # Encoded as RFC 6749 (2.3.1) says.
            names = quote_plus(settings.oidc_client_id), quote_plus(self._secret)
            options["auth"] = httpx.BasicAuth(*names)
        else:
            form["client_id"] = settings.oidc_client_id
            form |= {} if self._secret is None else {"client_secret": self._secret}
        token = await self._asked("POST", metadata["token_endpoint"], **options)
        claims = await self._checked(provider, token, begun)
        if settings.oidc_groups_claim not in claims and "userinfo_endpoint" in metadata:
            bearer = {"Authorization": f"Bearer {token.get('access_token')}"}
            more = await self._asked("GET", metadata["userinfo_endpoint"], headers=bearer)
            if more.get("sub") != claims["sub"]:
                raise _refused("the claim sub of the userinfo is not that of the token")
            claims = {**more, **claims}
        groups: Any = claims.get(settings.oidc_groups_claim)
        listed = cast("list[object]", groups) if isinstance(groups, list) else [groups]
        return _person(claims, settings.oidc_issuer), self._groups.rights_of(listed)

    async def end_address(self, back_to: str) -> str | None:
        """The provider's address for the end of its own session; None without one, or while it does not answer."""
        try:
            provider = await self._found()
        except InternalError:
            return None
        if (endpoint := provider.metadata.get("end_session_endpoint")) is None:
            return None
        query = {
            "client_id": self._settings.oidc_client_id,
            "post_logout_redirect_uri": back_to,
        }
        return add_params_to_uri(endpoint, [*query.items()])

    async def _checked(
        self, provider: _Provider, token: Mapping[str, Any], begun: BegunSignIn
    ) -> Mapping[str, Any]:
        """The claims of an ID token. Raises `AuthenticationError`."""
        names = self._settings.oidc_issuer, self._settings.oidc_client_id
        claims_of, now = self._tokens.claims_of, self._clock().timestamp()
        try:
            try:
                return claims_of(token, provider.keys, names, begun.nonce, now)
            except self._tokens.UnknownTokenKey:
                newer = await self._found(KEYS_AT_MOST_EVERY)
                return claims_of(token, newer.keys, names, begun.nonce, now)
        except self._tokens.UnknownTokenKey:
            raise _refused("the key of the ID token is not one of the provider's") from None
        except self._tokens.TokenFault as fault:
            raise _refused(str(fault)) from None

    async def _found(self, at_most_old: timedelta = FRESH_FOR) -> _Provider:
        """The provider, read again when it was read too long ago. Raises `InternalError` (503)."""
        async with self._reading:
            now, known = self._clock(), self._provider
            if known is not None and timedelta(0) <= now - known.read_at < at_most_old:
                return known
            if self._away_at is not None and timedelta(0) <= now - self._away_at < AWAY_FOR:
                raise _away()
            try:
                self._provider = await self._read(now)
            except (AuthenticationError, InternalError):
                self._away_at = now
                raise _away() from None
            return self._provider

    async def _read(self, now: datetime) -> _Provider:
        issuer = self._settings.oidc_issuer
        place = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
        metadata = await self._asked("GET", place)
        if metadata.get("issuer") != issuer:
            raise _refused("its description names another issuer")
        for name in (*ENDPOINTS, *MORE_ENDPOINTS):
            address = metadata.get(name)
            if address is None and name in MORE_ENDPOINTS:
                continue
            if not isinstance(address, str) or not is_address_allowed(address, issuer):
                raise _refused(f"its description has no {name} that may be used")
        keys: Any = await self._asked("GET", metadata["jwks_uri"])
        try:
            return _Provider(metadata, self._tokens.keys_of(keys), now)
        except self._tokens.TokenFault as fault:
            raise _refused(str(fault)) from None

    async def _asked(self, method: str, address: str, **options: Any) -> dict[str, Any]:
        """An object that the provider answers. Raises `AuthenticationError` where it refuses, else `InternalError`."""
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            **options.pop("headers", {}),
        }
        content = bytearray()
        try:
            async with (
                asyncio.timeout(ANSWER_WITHIN_S),
                httpx.AsyncClient(verify=self._tls, trust_env=False) as http,
                http.stream(method, address, headers=headers, **options) as answer,
            ):
                async for block in answer.aiter_raw():
                    content += block
                    if len(content) > ANSWER_BYTES:
                        raise _refused("its answer is too large")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            logger.warning(
                "the provider of OpenID Connect was not reached: %s", type(error).__name__
            )
            raise _away() from None
        if answer.status_code != 200:
            # A redirect is not followed: it could lead anywhere.
            logger.warning("the provider of OpenID Connect answered %d", answer.status_code)
            if answer.status_code in (400, 401, 403):
                raise _refused("it refused the code, or this service")
            raise _away()
        try:
            found: Any = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise _refused("its answer is no JSON object")
        return cast("dict[str, Any]", found)


def _person(claims: Mapping[str, Any], issuer: str) -> Person:
    subject = claims["sub"]
    if (
        not 0 < len(subject) <= LONGEST_SUBJECT
        or not subject.isascii()
        or not subject.isprintable()
    ):
        raise _refused("the claim sub of the ID token is missing or wrong")
    given = (claims.get(name) for name in NAMES)
    names = (
        "".join(c for c in one if c.isprintable()).strip() for one in given if isinstance(one, str)
    )
    return Person(issuer, subject, next((name for name in names if name), subject)[:LONGEST_NAME])


def is_address_allowed(address: str, issuer: str) -> bool:
    """Whether an address is one of TLS; without TLS only on this machine, where the issuer is, too."""
    try:
        place, own = urlsplit(address), urlsplit(issuer)
    except ValueError:
        return False
    if "@" in place.netloc or not place.hostname:
        return False
    return place.scheme == "https" or (place.scheme, place.hostname) == (own.scheme, own.hostname)


def _refused(why: str) -> AuthenticationError:
    logger.warning("an answer of the provider of OpenID Connect was refused: %s", why)
    return AuthenticationError(f"the answer of the provider of OpenID Connect was refused: {why}")


def _away() -> InternalError:
    text = "the provider of OpenID Connect does not answer: try again, or sign in by a key"
    return InternalError(text, status=503, retry_after=5)
