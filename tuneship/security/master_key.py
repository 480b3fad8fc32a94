"""The master key in its file, and the secrets that are derived from it, one for each purpose.

The file lies outside the database: whoever has a copy of the rows alone can open nothing that was sealed with the key.
"""

import hashlib
import hmac
import secrets
from pathlib import Path

from tuneship.host.durable import write_private
from tuneship.host.startup import StartupError

MASTER_KEY_BYTES = 32


class MasterKeyDamaged(StartupError):
    """The file does not hold the key that was written: nothing that was sealed or hashed with it can be used."""


class MasterKeyMissing(StartupError):
    """There is a database that was made with a master key, but no file with that key."""

    def __init__(self, file: Path) -> None:
        super().__init__(
            f"the master key {file} is missing, and another one would open nothing in the database: "
            "put it back, mount its place, or name the right file by TUNESHIP_MASTER_KEY_FILE"
        )


def read_or_make_secret(file: Path) -> bytes:
    """Read the master key, or make one where there is no file. Raises `MasterKeyDamaged`.

    Call it only for a new database: a new key opens nothing in one that is in use.
    """
    if not file.is_file():
        write_private(file, secrets.token_hex(MASTER_KEY_BYTES) + "\n")
    return read_secret(file)


def read_secret(file: Path) -> bytes:
    """Read the master key. Raises `MasterKeyMissing`, `MasterKeyDamaged`."""
    if not file.is_file():
        raise MasterKeyMissing(file)
    # One message for everything that is wrong with it: none of the file's text may be shown.
    try:
        secret = bytes.fromhex(file.read_text().strip())
    except ValueError:
        secret = b""
    if len(secret) != MASTER_KEY_BYTES:
        raise MasterKeyDamaged(
            f"{file} does not hold {MASTER_KEY_BYTES} bytes in hexadecimal: put the copy of your backup there"
        )
    return secret


def derived_secret(master: bytes, purpose: str) -> bytes:
    """Derive the secret for one purpose; knowing it reveals nothing about the master key or the other secrets."""
    return hmac.digest(master, purpose.encode(), hashlib.sha256)
