"""Encrypts values for the database: signing secrets of webhooks, and stored answers that may hold one.

It uses AES-256-GCM. Each value is bound to its row, so that it cannot be moved to another one.
"""

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# The first byte of every sealed value, so that a later version can use another cipher. No JSON text begins with it.
VERSION = b"\x01"
NONCE_BYTES = 12


class SealBroken(Exception):
    """The sealed bytes were changed, moved, or sealed with another master key."""


class Vault:
    """Seals and opens values with one key."""

    def __init__(self, key: bytes) -> None:
        """Use `key`: 32 bytes that lie outside the database."""
        self._cipher = AESGCM(key)

    def seal(self, plain: bytes, about: str) -> bytes:
        """Encrypt a value; `about`: the id of the row that will hold it."""
        # The nonce is random, as services that were restored from one backup must not reuse a counter.
        nonce = secrets.token_bytes(NONCE_BYTES)
        return VERSION + nonce + self._cipher.encrypt(nonce, plain, about.encode())

    def open(self, sealed: bytes, about: str) -> bytes:
        """Decrypt a value that was sealed for the same `about`. Raises `SealBroken`."""
        version, content = sealed[:1], sealed[1:]
        nonce, ciphertext = content[:NONCE_BYTES], content[NONCE_BYTES:]
        if version != VERSION:
            raise SealBroken
        try:
            return self._cipher.decrypt(nonce, ciphertext, about.encode())
        except (InvalidTag, ValueError):  # ValueError: too short to be a sealed value
            raise SealBroken from None
