"""Signed heads of the audit chain: number and seal of its last row, written down outside the database.

Rows that were taken from the end of the chain leave no gap in it; a head that was kept elsewhere names a row that is
no longer there. Signed with Ed25519, so that whoever keeps the file can check it with the public key alone.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tuneship.host.durable import flush_open

HEADS_FILE = "audit-heads.jsonl"
# Of each line.
BEGINNING = b'{"seq": '
# Bytes at the end of the file that surely hold the last line and more.
LONGEST_TAIL = 4096


def heads_file(chosen: Path | None, data_dir: Path) -> Path:
    """The file that the settings name; by default one in the data directory."""
    return chosen or data_dir / HEADS_FILE


class HeadsDamaged(Exception):
    """A line of the file is no head that this service has signed; the message names the line."""


@dataclass(frozen=True)
class Head:
    """The chain up to one row."""

    seq: int
    mac: bytes


class Heads:
    """The file of heads: one JSON object a line, only ever appended to."""

    def __init__(self, file: Path, key: bytes) -> None:
        """`key`: 32 secret bytes that lie outside the database."""
        self.file = file
        self._key = Ed25519PrivateKey.from_private_bytes(key)
        self._last = 0

    @property
    def public_key(self) -> Ed25519PublicKey:
        """What a keeper of the file checks signatures with."""
        return self._key.public_key()

    def append(self, head: Head, now: datetime) -> None:
        """Sign and add a head, unless the last one said the same. Raises `OSError`, `HeadsDamaged`."""
        if head.seq == self._last:
            return
        text = _signed_text(head.seq, head.mac.hex(), now.isoformat())
        line = {
            "seq": head.seq,
            "mac": head.mac.hex(),
            "at": now.isoformat(),
            "signature": self._key.sign(text).hex(),
        }
        if not self._last:
            self._drop_cut_line()
        self._last = 0  # until the whole line is there
        with self.file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
            flush_open(stream)
        self._last = head.seq

    def _drop_cut_line(self) -> None:
        """What a crash or a full disk left half-written at the end: it was never a head."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch(mode=0o600)
        content = self.file.read_bytes()
        whole = content.rfind(b"\n") + 1
        cut = content[whole : whole + len(BEGINNING)]
        if not BEGINNING.startswith(cut):  # not ours to cut: the setting names another file
            raise HeadsDamaged(f"{self.file} ends with something that is no signed head")
        os.truncate(self.file, whole)

    def read(self) -> Iterator[Head]:
        """Every head, oldest first; none without the file. Raises `HeadsDamaged`.

        A last line without its newline was cut by a crash while it was written.
        """
        if not self.file.is_file():
            return
        *lines, _cut = self.file.read_text(errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            yield self._read_line(line, f"line {number}")

    def last(self) -> Head | None:
        """The newest head, found from the end of the file; None without one. Raises `HeadsDamaged`, `OSError`."""
        if not self.file.is_file():
            return None
        with self.file.open("rb") as stream:
            stream.seek(max(0, self.file.stat().st_size - LONGEST_TAIL))
            *lines, _cut = stream.read().decode(errors="replace").split("\n")
        return self._read_line(lines[-1], "the last line") if lines else None

    def _read_line(self, line: str, place: str) -> Head:
        try:
            found = json.loads(line)
            seq, mac, at = int(found["seq"]), str(found["mac"]), str(found["at"])
            signature = bytes.fromhex(found["signature"])
            self.public_key.verify(signature, _signed_text(seq, mac, at))
            return Head(seq, bytes.fromhex(mac))
        except (ValueError, TypeError, KeyError, InvalidSignature):
            raise HeadsDamaged(f"{place} was not signed by this service") from None


def _signed_text(seq: int, mac: str, at: str) -> bytes:
    return f"{seq}\n{mac}\n{at}".encode()
