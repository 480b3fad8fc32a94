"""Signed heads of the audit chain: number and seal of its last row, recorded outside the database.

Rows deleted from the end of the chain leave no gap in it, but a head that was kept elsewhere then names a row that is
no longer there. Heads are signed with Ed25519, so that whoever keeps the file can verify it with the public key alone.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tuneship.contract.audit import AuditHead, signed_text
from tuneship.host.durable import flush_open

HEADS_FILE = "audit-heads.jsonl"
# Every line begins with these bytes.
LINE_START = b'{"seq": '
# How much of the end of the file is read to find the last line, which is much shorter.
TAIL_BYTES = 4096


def heads_file(chosen: Path | None, data_dir: Path) -> Path:
    """The file that the settings name, or by default the one in the data directory."""
    return chosen or data_dir / HEADS_FILE


class HeadsDamaged(Exception):
    """A line of the file is not a head signed by this service; the message names the line."""


@dataclass(frozen=True)
class Head:
    """The number and seal of one row, which vouch for the chain up to it."""

    seq: int
    mac: bytes


class Heads:
    """The append-only file of heads, one JSON object per line."""

    def __init__(self, file: Path, key: bytes) -> None:
        """Sign with `key`: 32 secret bytes that lie outside the database."""
        self.file = file
        self._key = Ed25519PrivateKey.from_private_bytes(key)
        self._last = 0

    @property
    def public_key(self) -> Ed25519PublicKey:
        """The public key with which anybody can verify the signatures."""
        return self._key.public_key()

    def signed(self, head: Head, now: datetime) -> AuditHead:
        """The head with its signature and the key that verifies it."""
        mac, at = head.mac.hex(), now.isoformat()
        return AuditHead(
            seq=head.seq,
            mac=mac,
            at=at,
            signature=self._key.sign(signed_text(head.seq, mac, at)).hex(),
            public_key=self.public_key.public_bytes_raw().hex(),
        )

    def append(self, head: Head, now: datetime) -> None:
        """Sign and append a head, unless it is the one appended last. Raises `OSError`, `HeadsDamaged`."""
        if head.seq == self._last:
            return
        line = self.signed(head, now).model_dump(exclude={"public_key"})
        if not self._last:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch(mode=0o600)
            content = self.file.read_bytes()
            # A last line that a crash or a full disk cut short was never a head.
            whole = content.rfind(b"\n") + 1
            cut = content[whole : whole + len(LINE_START)]
            if not LINE_START.startswith(cut):  # the setting names a file that is not ours to cut
                raise HeadsDamaged(f"{self.file} ends with something that is not a signed head")
            os.truncate(self.file, whole)
        # Until the whole line is on disk, the next append must look for a cut line again.
        self._last = 0
        with self.file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
            flush_open(stream)
        self._last = head.seq

    def read(self) -> Iterator[Head]:
        """Iterate over the heads, oldest first; none if there is no file. Raises `HeadsDamaged`.

        A last line without a newline is ignored: a crash cut it while it was written.
        """
        if not self.file.is_file():
            return
        *lines, _cut = self.file.read_text(errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            yield self._read_line(line, f"line {number}")

    def last(self) -> Head | None:
        """The newest head, read from the end of the file; None if there is none. Raises `HeadsDamaged`, `OSError`."""
        if not self.file.is_file():
            return None
        with self.file.open("rb") as stream:
            stream.seek(max(0, self.file.stat().st_size - TAIL_BYTES))
            *lines, _cut = stream.read().decode(errors="replace").split("\n")
        return self._read_line(lines[-1], "the last line") if lines else None

    def _read_line(self, line: str, place: str) -> Head:
        try:
            record = json.loads(line)
            seq, mac, at = int(record["seq"]), str(record["mac"]), str(record["at"])
            signature = bytes.fromhex(record["signature"])
            self.public_key.verify(signature, signed_text(seq, mac, at))
            return Head(seq, bytes.fromhex(mac))
        except (ValueError, TypeError, KeyError, InvalidSignature):
            raise HeadsDamaged(f"{place} was not signed by this service") from None
