"""What sealing costs: files as the service writes and reads them, beside the same bytes in plain.

    python benchmarks/sealing.py [--mebibytes 128] [--rounds 7]

Three ways that every object takes, each as the store does it (write, hash, flush, move into place; or check the digest
and read): a dataset that is uploaded, a dataset that a starting job reads, and the tensors of an adapter that a replica
loads. Rounds take turns between sealed and plain; processor time of this process, so other programs' load does not
count. Every round must give back the very bytes that were written, or nothing is printed.
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
from tuneship.security.sealed_files import BLOCK, new_key, open_plain, read_plain, write_sealed
from tuneship.store.blobs import DATA_FILE, Blobs, check_digest, sha256_of

# Bytes that come at once from a connection.
UPLOADED = 64 << 10
ADAPTER = 4 << 20


def upload_plain(folder: Path, content: bytes) -> Path:
    """As `Blobs` takes an upload, without a seal."""
    staged, kept = folder / "staged", folder / "plain" / DATA_FILE
    digests = hashlib.sha256(), hashlib.sha256()
    """Of the content and of the file, which differ where it is sealed."""
    with staged.open("wb", buffering=0) as file:
        for start in range(0, len(content), UPLOADED):
            block = content[start : start + UPLOADED]
            for one in digests:
                one.update(block)
            file.write(block)
    flush(staged)
    kept.parent.mkdir(exist_ok=True)
    staged.replace(kept)
    flush(kept.parent)
    return kept


def upload_sealed(blobs: Blobs, content: bytes) -> tuple[Path, str]:
    """The service's own way; answers the file and its key."""
    with blobs.staged() as staged:
        for start in range(0, len(content), UPLOADED):
            staged.write(content[start : start + UPLOADED])
        blobs.keep(staged, f"datasets/ds_1/{DATA_FILE}")
    return blobs.local(f"datasets/ds_1/{DATA_FILE}"), staged.key


def read(path: Path, key: str | None, sha256: str) -> None:
    """As a job that starts: the service checks the digest, the trainer reads block by block."""
    check_digest(path, sha256)
    with open_plain(path, key) as file:
        while file.read(BLOCK):
            pass


def spent(work: Callable[[], object]) -> float:
    """Processor seconds of this process."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


class Rounds:
    """Plain and sealed in turn."""

    def __init__(self, name: str, size: int) -> None:
        """`size`: bytes that each takes."""
        self._name = name
        self._size = size
        self._plain: list[float] = []
        self._sealed: list[float] = []

    def take(self, plain: Callable[[], object], sealed: Callable[[], object]) -> None:
        """One of each; who is first changes."""
        turns = [(self._plain, plain), (self._sealed, sealed)]
        for kept, work in turns if len(self._plain) % 2 else reversed(turns):
            kept.append(spent(work))

    def tell(self) -> None:
        """Medians, and the ratio of the rounds; the first round warms up."""
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
    for one in measured:
        one.tell()


def _measured(folder: Path, content: bytes, rounds: int) -> list[Rounds]:
    blobs = Blobs(str(folder / "blobs"), folder / "scratch")
    upload = Rounds("upload into the store", len(content))
    start = Rounds("job start: check and read", len(content))
    adapter = Rounds("adapter of 4 MiB: read", ADAPTER)
    key, tensors = new_key(), content[:ADAPTER]
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
    """The file's digest, when it is plain or sealed as it should be and says what was written."""
    if read_plain(path, key) != content or (content[:64] in path.read_bytes()) != is_plain:
        raise SystemExit("what was written is not what was read: the times mean nothing")
    return sha256_of(path)


if __name__ == "__main__":
    main()
