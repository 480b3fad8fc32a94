"""Measures the cost of sealing: files as the service writes and reads them, beside the same bytes in plain.

    python benchmarks/sealing.py [--mebibytes 128] [--rounds 7]

Three cases, each as the store does it (write, hash, flush, move into place; or check the digest and read): a dataset
that is uploaded, a dataset that a starting job reads, and the tensors of an adapter that a replica loads. Rounds
alternate between sealed and plain, in processor time of this process, so that the load of other programs does not
count. Every round must return the bytes that were written, or nothing is printed.
"""

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tuneship.host.durable import flush
from tuneship.host.file_digest import sha256_of
from tuneship.security.sealed_files import (
    BLOCK_BYTES,
    new_key,
    open_plain,
    read_plain,
    write_sealed,
)
from tuneship.store.files.blobs import DATA_FILE, Blobs, check_digest
from tuneship.store.files.local_blobs import LocalBlobs

# The size of the pieces in which a connection delivers an upload.
UPLOAD_PIECE_BYTES = 64 << 10
ADAPTER_BYTES = 4 << 20


def upload_plain(folder: Path, content: bytes) -> Path:
    """Store an upload as `Blobs` does, without sealing it."""
    staged, kept = folder / "staged", folder / "plain" / DATA_FILE
    # `Blobs` hashes the content and the file, which differ where it is sealed.
    digests = hashlib.sha256(), hashlib.sha256()
    with staged.open("wb", buffering=0) as file:
        for start in range(0, len(content), UPLOAD_PIECE_BYTES):
            block = content[start : start + UPLOAD_PIECE_BYTES]
            for digest in digests:
                digest.update(block)
            file.write(block)
    flush(staged)
    kept.parent.mkdir(exist_ok=True)
    staged.replace(kept)
    flush(kept.parent)
    return kept


def upload_sealed(blobs: Blobs, content: bytes) -> tuple[Path, str]:
    """Store an upload with `Blobs`; returns the file and its key."""
    with blobs.staged() as staged:
        for start in range(0, len(content), UPLOAD_PIECE_BYTES):
            staged.write(content[start : start + UPLOAD_PIECE_BYTES])
        blobs.keep(staged, f"datasets/ds_1/{DATA_FILE}")
    return blobs.path_of("datasets/ds_1") / DATA_FILE, staged.key


def read(path: Path, key: str | None, sha256: str) -> None:
    """Read a dataset as a starting job does: check the digest, then read block by block."""
    check_digest(path, sha256)
    with open_plain(path, key) as file:
        while file.read(BLOCK_BYTES):
            pass


def spent(work: Callable[[], object]) -> float:
    """Processor seconds of this process."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


class Rounds:
    """Alternating measurements of plain and sealed."""

    def __init__(self, name: str, size: int) -> None:
        """`size` is the number of bytes of each measurement."""
        self._name = name
        self._size = size
        self._plain: list[float] = []
        self._sealed: list[float] = []

    def take(self, plain: Callable[[], object], sealed: Callable[[], object]) -> None:
        """Measure both once; which is first alternates."""
        turns = [(self._plain, plain), (self._sealed, sealed)]
        for kept, work in turns if len(self._plain) % 2 else reversed(turns):
            kept.append(spent(work))

    def report(self) -> None:
        """Print medians and the ratio of the rounds; the first round is a warm-up."""
        plain, sealed = self._plain[1:], self._sealed[1:]
        ratios = [one / other for one, other in zip(sealed, plain, strict=True)]
        middle = statistics.median(sealed) - statistics.median(plain)
        print(
            f"{self._name:30} plain {self._size / statistics.median(plain) / 1e6:7.0f} MB/s, "
            f"sealed {self._size / statistics.median(sealed) / 1e6:7.0f} MB/s of processor time; "
            f"{statistics.median(ratios):5.2f}x (from {min(ratios):.2f} to {max(ratios):.2f}), "
            f"{middle * 1e3:.2f} ms more"
        )


def main() -> None:
    """Measure all three, then print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mebibytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the files lie")
    chosen = parser.parse_args()
    size = chosen.mebibytes << 20
    with tempfile.TemporaryDirectory(dir=chosen.folder) as made:
        measured = _measured(Path(made), os.urandom(size), chosen.rounds)
    for rounds in measured:
        rounds.report()


def _measured(folder: Path, content: bytes, rounds: int) -> list[Rounds]:
    blobs = LocalBlobs(folder)
    upload = Rounds("upload into the store", len(content))
    start = Rounds("job start: check and read", len(content))
    adapter = Rounds("adapter of 4 MiB: read", ADAPTER_BYTES)
    key, tensors = new_key(), content[:ADAPTER_BYTES]
    files = {None: folder / "adapter_plain", key: folder / "adapter_sealed"}
    for opens, file in files.items():
        write_sealed(file, opens, tensors)
    for _ in range(rounds + 1):
        kept: list[tuple[Path, str | None]] = []
        upload.take(
            lambda kept=kept: kept.append((upload_plain(folder, content), None)),
            lambda kept=kept: kept.append(upload_sealed(blobs, content)),
        )
        ways = {
            opens is None: (file, opens, _whole(file, opens, content, opens is None))
            for file, opens in kept
        }
        start.take(lambda ways=ways: read(*ways[True]), lambda ways=ways: read(*ways[False]))
        for opens, file in files.items():
            _whole(file, opens, tensors, opens is None)
        adapter.take(lambda: read_plain(files[None], None), lambda: read_plain(files[key], key))
    return [upload, start, adapter]


def _whole(path: Path, key: str | None, content: bytes, is_plain: bool) -> str:
    """The digest of the file; exits unless it holds the content, plain or sealed as requested."""
    if read_plain(path, key) != content or (content[:64] in path.read_bytes()) != is_plain:
        raise SystemExit("what was written is not what was read: the times mean nothing")
    return sha256_of(path)


if __name__ == "__main__":
    main()
