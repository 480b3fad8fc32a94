"""Opaque continuation tokens for logs, bound to their resource by an HMAC, so that they cannot be forged or moved."""

import base64
import binascii
import hashlib
import hmac

from tuneship.contract.errors import ErrorDetail, ValidationFailed

MAC_BYTES = 12


class Cursors:
    """Signs and reads cursors with one secret."""

    def __init__(self, secret: bytes) -> None:
        """`secret` must survive restarts, so that cursors do too."""
        self._secret = secret

    def _mac(self, resource_id: str, position: bytes) -> bytes:
        text = resource_id.encode() + b"\n" + position
        return hmac.digest(self._secret, text, hashlib.sha256)[:MAC_BYTES]

    def issue(self, resource_id: str, position: int) -> str:
        """A token for a position in the resource's log."""
        text = str(position).encode()
        return base64.urlsafe_b64encode(self._mac(resource_id, text) + text).decode().rstrip("=")

    def position(self, resource_id: str, token: str, param: str = "after") -> int:
        """The position in a token of this resource. Raises `ValidationFailed`, which names `param`."""
        try:
            raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except (binascii.Error, ValueError):
            raw = b""
        mac, text = raw[:MAC_BYTES], raw[MAC_BYTES:]
        if not text.isdigit() or not hmac.compare_digest(mac, self._mac(resource_id, text)):
            detail = ErrorDetail(param, "invalid_value", "is not a cursor of this log")
            raise ValidationFailed(
                f"{param} is not a cursor of this log", param=param, details=[detail]
            )
        return int(text)
