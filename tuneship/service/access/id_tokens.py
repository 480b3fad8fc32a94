"""Verifies ID tokens of OpenID Connect.

`open_id.py` imports it where people sign in so: its libraries load certificates and more that other services need not
have in memory.
"""

from collections.abc import Mapping
from typing import Any, cast

from authlib.oauth2.rfc7636 import (
    create_s256_code_challenge,  # pyright: ignore[reportUnknownVariableType]
)
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import ClaimError, InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet
from joserfc.jws import JWSRegistry

# Of keys of the provider alone: `none` and those of a shared secret are not among them.
_SIZED = tuple(f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512))
ALGORITHMS = (*_SIZED, "Ed25519", "EdDSA")
CLOCK_SKEW_S = 60
UNREADABLE = (JoseError, ValueError, TypeError, KeyError, RecursionError)


class UnknownTokenKey(Exception):
    """The token names a key that is not among the provider's."""


class TokenFault(Exception):
    """A token or a set of keys cannot be used; the text repeats nothing of it."""


def challenge_of(verifier: str) -> str:
    """The challenge of PKCE for a verifier."""
    return cast("str", create_s256_code_challenge(verifier))


def keys_of(published: Any) -> KeySet:
    """The keys that a provider publishes. Raises `TokenFault`."""
    try:
        return KeySet.import_key_set(published)
    except UNREADABLE as error:
        raise TokenFault(f"its keys cannot be read ({type(error).__name__})") from None


def claims_of(
    answer: Mapping[str, Any], keys: KeySet, names: tuple[str, str], nonce: str, now: float
) -> Mapping[str, Any]:
    """The claims of the ID token in an answer. `names`: issuer and client. Raises `TokenFault`, `UnknownTokenKey`."""
    token, (issuer, client_id) = answer.get("id_token"), names
    if not isinstance(token, str):
        raise TokenFault("there is no ID token in it")
    # Providers add headers of their own; those that must be understood (`crit`) are still refused.
    registry = JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)
    try:
        decoded = jwt.decode(token, keys, registry=registry)
        claims: Any = CodeIDToken(
            decoded.claims,
            decoded.header,
            {
                "iss": {"essential": True, "value": issuer},
                "aud": {"essential": True, "value": client_id},
            },
            {
                "nonce": nonce,
                "client_id": client_id,
                "access_token": answer.get("access_token"),
            },
        )
        claims.validate(int(now), CLOCK_SKEW_S)
    except InvalidKeyIdError:
        raise UnknownTokenKey from None
    except ClaimError as error:
        raise TokenFault(f"the claim {error.claim} of the ID token is missing or wrong") from None
    except UNREADABLE as error:
        raise TokenFault(f"the ID token cannot be verified ({type(error).__name__})") from None
    return claims
