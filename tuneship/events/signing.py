"""Signatures of Standard Webhooks 1.0: HMAC-SHA256 over `{id}.{timestamp}.{body}`, one for each secret in force.

Six lines of our own, checked in the tests against two other implementations (npm and Python `standardwebhooks`): the
Python package signs with one secret only, takes the body as text, and shifts a time that is not UTC.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

PREFIX = "whsec_"
SECRET_BYTES = 32


def new_secret() -> str:
    """`whsec_` and 32 random bytes in base64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signed_headers(
    signers: Sequence[str], event_id: str, seconds: int, body: bytes
) -> dict[str, str]:
    """The three headers of a try; `seconds`: UTC epoch seconds of this try, so a repeated one is not too old."""
    text = f"{event_id}.{seconds}.".encode() + body
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(seconds),
        "webhook-signature": " ".join(f"v1,{_signature(one, text)}" for one in signers),
    }


def _signature(secret: str, text: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(PREFIX))
    return base64.b64encode(hmac.digest(key, text, hashlib.sha256)).decode()
