"""Measures the speed and memory with which `tuneship serve` receives and checks a large JSON Lines file.

    python benchmarks/upload.py [--mebibytes 256] [--rounds 3] [--validate]
    python benchmarks/upload.py --mebibytes 2000 --rounds 0      # memory alone: one upload, no peer

The peer is `tokenizers` alone: the same texts, already parsed, passed to `encode_batch_fast` of the same tokenizer on
the same cores. The time of tuneship is the whole path through HTTP: from the first byte sent until the dataset is
`processed` (or, with --validate, until the report has arrived). Both run alternately; the numbers of examples and of
tokens must agree before anything is printed.
"""

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from measuring.running import running
from tokenizers import Tokenizer

from tuneship.client import Client
from tuneship.contract.datasets import DatasetUpload, DatasetValidate

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "tuneship" / "base_models" / "tuneship-tiny" / "tokenizer.json"
DIAGNOSES = ROOT / "examples" / "icd10cm" / "diagnoses.txt"
SERVICE = {"TUNESHIP_PRELOAD_BASE_MODELS": "false", "TUNESHIP_PRELOAD_TRAINING": "false"}
PASSAGES = 4000
# The peer gets so much per call; it is no faster with more.
PEER_CHARACTERS = 256 << 10
POLL_INTERVAL_S = 0.05


def write_file(path: Path, size: int) -> int:
    """Write different conversations of about 600 bytes, up to `size` bytes; returns their number."""
    dice = random.Random(1)
    diagnoses = DIAGNOSES.read_text().splitlines()
    passages = [", ".join(dice.choices(diagnoses, k=3)) for _ in range(PASSAGES)]
    number = written = 0
    with path.open("wb") as file:
        while written < size:
            turns = [
                {"role": "user", "content": f"Case {number}: {dice.choice(passages)}?"},
                {"role": "assistant", "content": f"{dice.choice(passages)} ({dice.random()})."},
                {"role": "user", "content": f"And with {dice.choice(passages)}?"},
                {"role": "assistant", "content": dice.choice(passages)},
            ]
            written += file.write(orjson.dumps({"messages": turns}) + b"\n")
            number += 1
    return number


def texts_of(path: Path) -> Iterator[list[str]]:
    """The texts of the file in pieces."""
    texts: list[str] = []
    size = 0
    with path.open("rb") as file:
        for line in file:
            for turn in orjson.loads(line)["messages"]:
                texts.append(turn["content"])
                size += len(turn["content"])
            if size >= PEER_CHARACTERS:
                yield texts
                texts, size = [], 0
    yield texts


def tokenize(path: Path) -> tuple[float, int]:
    """Seconds that the tokenizer alone takes, and its number of tokens; parsing is not counted."""
    tokenizer: Any = Tokenizer.from_file(str(TOKENIZER))
    seconds, tokens = 0.0, 0
    for texts in texts_of(path):
        begun = time.perf_counter()
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        tokens += sum(len(one) for one in encoded)
        seconds += time.perf_counter() - begun
    return seconds, tokens


class Memory:
    """The most resident memory of a process while it is watched."""

    def __init__(self, pid: int) -> None:
        """Look from now on."""
        self._status = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()
        self.most = self.now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def now(self) -> int:
        """Resident bytes."""
        lines = self._status.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

    def _watch(self) -> None:
        while not self._ended.wait(POLL_INTERVAL_S):
            self.most = max(self.most, self.now())

    def end(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self._thread.join()


def upload(client: Client, path: Path) -> tuple[float, int, int]:
    """Seconds until processed, examples, tokens; the dataset is deleted again."""
    begun = time.perf_counter()
    with path.open("rb") as file:
        made = client.datasets.upload(DatasetUpload(name="big", format="conversation"), file)
    sent = time.perf_counter() - begun
    while (found := client.datasets.get(made.id)).status == "processing":
        time.sleep(POLL_INTERVAL_S)
    seconds = time.perf_counter() - begun
    client.datasets.delete(made.id)
    if found.status != "processed":
        raise SystemExit(f"the dataset is {found.status}")
    print(f"  taken in after {sent:.1f} s, processed after {seconds:.1f} s", flush=True)
    return seconds, found.num_examples, found.total_tokens


def validate(client: Client, path: Path) -> tuple[float, int, int]:
    """Seconds until the report, examples, tokens."""
    begun = time.perf_counter()
    with path.open("rb") as file:
        report = client.with_options(timeout_s=7200).datasets.validate(
            DatasetValidate(format="conversation"), file
        )
    return time.perf_counter() - begun, report.num_examples, report.total_tokens


def compare(client: Client, path: Path, examples: int, chosen: argparse.Namespace) -> None:
    """Measure the peer and tuneship alternately, compare and print."""
    size, take = path.stat().st_size, validate if chosen.validate else upload
    peer: list[float] = []
    ours: list[float] = []
    counted: set[int] = set()
    for number in range(max(1, chosen.rounds)):
        if number < chosen.rounds:
            seconds, tokens = tokenize(path)
            peer.append(seconds)
            counted.add(tokens)
        seconds, found, tokens = take(client, path)
        ours.append(seconds)
        counted.add(tokens)
        if found != examples or len(counted) != 1:
            raise SystemExit(f"counted {found} of {examples} examples and {counted} tokens")
    print(f"file of {size >> 20} MiB, {examples} examples, {counted.pop()} tokens")
    print(
        f"{take.__name__} through HTTP, all checks   {size / statistics.median(ours) / 1e6:8.2f} MB/s"
    )
    if not peer:
        return
    ratios = [a / b for a, b in zip(peer, ours, strict=True)]
    print(f"tokenizers alone                   {size / statistics.median(peer) / 1e6:8.2f} MB/s")
    print(
        f"ratio, median of {len(ratios)}                 {statistics.median(ratios):8.2f} x"
        f"   (from {min(ratios):.2f} to {max(ratios):.2f})"
    )


def main() -> None:
    """Measure with a fresh service and a fresh file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--validate", action="store_true", help="measure validate, not upload")
    parser.add_argument("--folder", type=Path, help="where the file and the service's data lie")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        path, data_dir = Path(folder) / "big.jsonl", Path(folder) / "data"
        examples = write_file(path, chosen.mebibytes << 20)
        with running(data_dir, SERVICE) as service:
            memory = Memory(service.pid)
            before = memory.most
            try:
                with Client(service.settings) as client:
                    compare(client, path, examples, chosen)
            finally:
                memory.end()
            grown = (memory.most - before) >> 20
            print(f"resident memory of the service    {before >> 20:5} MiB, then {grown} MiB more")


if __name__ == "__main__":
    main()
