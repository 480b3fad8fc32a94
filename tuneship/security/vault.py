"""What the database holds encrypted: signing secrets, and stored answers that may show one.

AES-256-GCM, bound to the row, so that nothing can be moved to another.
"""

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# Begins whatever is sealed, so that another cipher can follow; no JSON text begins with it.
VERSION = b"\x01"
NONCE_BYTES = 12


class SealBroken(Exception):
    """The sealed bytes were changed, moved, or sealed with another master key."""


class Vault:
    """Seals and opens under one key."""

    def __init__(self, key: bytes) -> None:
        """`key`: 32 bytes that lie outside the database."""
        self._cipher = AESGCM(key)

    def seal(self, plain: bytes, about: str) -> bytes:
        """`about`: the id of the row that will hold it."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return VERSION + nonce + self._cipher.encrypt(nonce, plain, about.encode())

    def open(self, sealed: bytes, about: str) -> bytes:
        """What was sealed. Raises `SealBroken`."""
        version, content = sealed[:1], sealed[1:]
        nonce, ciphertext = content[:NONCE_BYTES], content[NONCE_BYTES:]
        if version != VERSION:
            raise SealBroken
        try:
            return self._cipher.decrypt(nonce, ciphertext, about.encode())
        except (InvalidTag, ValueError):  # ValueError: too short to be sealed at all
            raise SealBroken from None
