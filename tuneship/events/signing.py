"""Signs webhooks as in Standard Webhooks 1.0: HMAC-SHA256 over `{id}.{timestamp}.{body}`, one signature per secret.

It is our own code, tested against two other implementations (npm and Python `standardwebhooks`), because the Python
package signs with one secret only, takes the body as text, and shifts times that are not in UTC.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

PREFIX = "whsec_"
SECRET_BYTES = 32


def new_secret() -> str:
    """Generate a signing secret: `whsec_` and 32 random bytes in base64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signed_headers(
    signers: Sequence[str], event_id: str, seconds: int, body: bytes
) -> dict[str, str]:
    """The three headers of an attempt, signed with every secret in `signers`.

    `seconds`: the time of this attempt in epoch seconds, not that of the event, so that receivers do not refuse retries
    as too old.
    """
    text = f"{event_id}.{seconds}.".encode() + body
    signatures: list[str] = []
    for secret in signers:
        key = base64.b64decode(secret.removeprefix(PREFIX))
        digest = hmac.digest(key, text, hashlib.sha256)
        signatures.append(f"v1,{base64.b64encode(digest).decode()}")
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(seconds),
        "webhook-signature": " ".join(signatures),
    }
