"""Measures the speed and memory with which the client makes JSON Lines of CSV and Parquet files and of a generator.

    python benchmarks/conversion.py [--mebibytes 100]

Each source is read in a process of its own, and sent to a transport that drops it. The memory is what the process takes
at most, less what it has taken before the upload begins; the libraries are loaded by then.
"""

import argparse
import csv
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import SecretStr

from tuneship.client import Client
from tuneship.contract.datasets import DatasetUpload
from tuneship.settings import ClientSettings

DIAGNOSES = Path(__file__).parents[1] / "examples" / "icd10cm" / "diagnoses.txt"
SOURCES = ("csv", "parquet", "generator")


def rows(size: int) -> Iterator[dict[str, str]]:
    """Different rows of about 600 bytes, up to `size` bytes."""
    dice = random.Random(1)
    diagnoses = DIAGNOSES.read_text().splitlines()
    number = written = 0
    while written < size:
        texts = [f'Case {number}:\n"{", ".join(dice.choices(diagnoses, k=5))}"' for _ in range(2)]
        yield {"instruction": texts[0], "response": texts[1]}
        written += sum(map(len, texts))
        number += 1


class Dropped(httpx.BaseTransport):
    """Takes what is sent, block by block."""

    size = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer as the service does when it has read the whole file."""
        if isinstance(request.stream, httpx.SyncByteStream):
            self.size = sum(map(len, request.stream))
        return httpx.Response(
            201,
            json={
                "id": "ds_1",
                "name": "rows",
                "format": "instruction",
                "num_examples": 1,
                "total_tokens": 1,
                "created_at": "2026-01-01T00:00:00Z",
                "status": "processed",
            },
        )


def write(folder: Path, size: int) -> None:
    """Write the rows as CSV and as Parquet with one group of rows, as pandas does."""
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["instruction", "response"])
        writer.writeheader()
        writer.writerows(rows(size))
    pq.write_table(pa.Table.from_pylist(list(rows(size))), folder / "rows.parquet")


def measure(kind: str, folder: Path, size: int) -> None:
    """Upload one source and print what it took."""
    settings = ClientSettings(url="http://nowhere", api_key=SecretStr("k"), client_id="c")
    dropped = Dropped()
    form = DatasetUpload(name="rows", format="instruction")
    with Client(settings, dropped) as client:
        # A first upload of a few rows loads what is loaded when it is needed.
        if kind != "generator":
            write(folder, 1000)
        client.datasets.upload(form, folder / f"rows.{kind}" if kind != "generator" else rows(1000))
        subprocess.run([sys.executable, __file__, "--write", str(folder), str(size)], check=True)
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        client.datasets.upload(form, folder / f"rows.{kind}" if kind != "generator" else rows(size))
        seconds = time.perf_counter() - begun
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if dropped.size < size:
        sys.exit(f"{kind}: only {dropped.size} bytes were sent")
    print(
        f"{kind:<10} {dropped.size / 2**20:6.0f} MiB sent in {seconds:5.1f} s, "
        f"{grown / 1024:5.1f} MiB more memory"
    )


def main() -> None:
    """Measure every source in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=100)
    parser.add_argument("--write", nargs=2, metavar=("FOLDER", "BYTES"), help=argparse.SUPPRESS)
    parser.add_argument("--source", choices=SOURCES, help="measure this one, in this process")
    chosen = parser.parse_args()
    if chosen.write:
        write(Path(chosen.write[0]), int(chosen.write[1]))
    elif chosen.source:
        with tempfile.TemporaryDirectory() as folder:
            measure(chosen.source, Path(folder), chosen.mebibytes << 20)
    else:
        size = ["--mebibytes", str(chosen.mebibytes)]
        for kind in SOURCES:
            subprocess.run([sys.executable, __file__, "--source", kind, *size], check=True)


if __name__ == "__main__":
    main()
