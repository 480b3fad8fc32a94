"""Measures get, list and create through HTTP with 32 clients at once, among 10,000 and among 1,000,000 jobs.

    python benchmarks/control_plane.py

Two services run side by side and get requests alternately, so that a busy machine slows both. The jobs are copies of a
real one, written into the database directly. A training job holds the only slot and its process is paused, so that
only the API is measured. Every answer is checked.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import sqlalchemy as sa
from measuring.running import UNLIMITED, example_rows, own_cpu_seconds, start, stop, upload

from tuneship.client import Client
from tuneship.contract.jobs import Hyperparameters, JobCreate
from tuneship.settings import ClientSettings
from tuneship.store.database.database import Database, sqlite_url
from tuneship.store.database.tables import jobs

CLIENTS = 32
OWN_JOBS = {"TUNESHIP_MAXIMUM_ACTIVE_JOBS": "1000000"}
NEWEST = "ft_{:024d}"
JOBS = "/v1/fine-tuning/jobs"


@dataclass
class FilledService:
    """One service with many jobs."""

    number: int
    data_dir: Path
    process: "subprocess.Popen[str] | None" = None
    dataset: str = ""
    spans: dict[str, list[float]] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    paused: int = 0

    def fill(self) -> None:
        """Create one real job and its copies, and start a service whose training process is paused."""
        self.process, _ = start(self.data_dir, {"TUNESHIP_PRELOAD_TRAINING": "false"})
        with self.client() as client:
            self.dataset = upload(client, "bench", example_rows("hospital_a.jsonl", 64))
            template = client.jobs.create(self.job()).id
            client.jobs.cancel(template)
            while client.jobs.get(template).status != "cancelled":
                time.sleep(0.05)
        stop(self.process)
        copy(self.data_dir / "tuneship.sqlite", template, self.number)
        self.process, _ = start(self.data_dir, {"TUNESHIP_PRELOAD_TRAINING": "false"})
        with self.client() as client:
            client.jobs.create(self.job(epochs=10_000))
        while not (found := trainer_of(self.process.pid)):
            time.sleep(0.05)
        self.paused = found
        os.kill(self.paused, signal.SIGSTOP)

    @cached_property
    def first_key(self) -> dict[str, str]:
        """The credentials file that the service wrote at its first start."""
        return json.loads((self.data_dir / "credentials.json").read_text())

    def client(self) -> Client:
        """A client with the service's first key."""
        return Client(ClientSettings.from_credentials(self.data_dir / "credentials.json"))

    def job(self, epochs: int = 1) -> JobCreate:
        """A small job; only one of them ever runs."""
        return JobCreate(
            base_model="tuneship-tiny",
            dataset_id=self.dataset,
            model_name="bench",
            hyperparameters=Hyperparameters(epochs=epochs),
        )

    def request(self, kind: str, number: int) -> bytes:
        """The bytes of a request of this kind."""
        body = b""
        if kind == "create":
            body = json.dumps(self.job().model_dump(mode="json", exclude_unset=True)).encode()
        target = {
            "get": f"{JOBS}/{NEWEST.format(number * 7919 % self.number)}",
            "list": JOBS,
            "list, filtered": f"{JOBS}?status=queued",
            "list, middle page": f"{JOBS}?offset={self.number // 2}",
            "create": JOBS,
        }[kind]
        head = (
            f"{'POST' if body else 'GET'} {target} HTTP/1.1\r\nHost: bench\r\n"
            f"Authorization: Bearer {self.first_key['api_key']}\r\n"
            f"X-Client-ID: {self.first_key['client_id']}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def round(self, kind: str, requests: int) -> None:
        """Let the clients share `requests`; records the milliseconds of each, and the rate per second."""
        port = int(self.first_key["base_url"].rpartition(":")[2])
        left = iter(range(requests))
        wanted = CHECKS[kind]
        spans = self.spans.setdefault(kind, [])
        lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CLIENTS)]

        async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for number in left:
                sent = self.request(kind, number)
                begun = time.perf_counter()
                writer.write(sent)
                status, body = await answer(reader)
                spans.append((time.perf_counter() - begun) * 1000)
                if not wanted(status, body):
                    raise SystemExit(f"{kind}: a wrong answer, {status}")
            writer.close()

        begun, computed = time.perf_counter(), self.cpu_ms()
        await asyncio.gather(*(ask(*line) for line in lines))
        self.rates.setdefault(kind, []).append(requests / (time.perf_counter() - begun))
        self.cpu.setdefault(kind, []).append((self.cpu_ms() - computed) / requests)

    def cpu_ms(self) -> float:
        """CPU milliseconds of the service since its start."""
        assert self.process is not None  # noqa: S101 - it is asked while it runs
        return own_cpu_seconds(self.process.pid) * 1000


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an answer; returns status and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head[9:12]), await reader.readexactly(length)


CHECKS: dict[str, Callable[[int, bytes], bool]] = {
    "get": lambda status, body: status == 200 and json.loads(body)["model_name"] == "bench",
    "list": lambda status, body: status == 200 and len(json.loads(body)["jobs"]) == 20,
    "list, filtered": lambda status, body: status == 200 and "pagination" in json.loads(body),
    "list, middle page": lambda status, body: status == 200 and len(json.loads(body)["jobs"]) == 20,
    "create": lambda status, body: status == 201 and json.loads(body)["status"] == "queued",
}


def copy(file: Path, template: str, number: int) -> None:
    """Insert completed copies of a job, a second apart."""
    replaced = {
        "id": "printf('ft_%024d', i)",
        "status": "'completed'",
        "created_at": "datetime('2020-01-01', '+' || i || ' seconds') || '.000000'",
    }
    names = [column.name for column in jobs.columns]
    database = Database(sqlite_url(file))
    with database.write() as connection:
        connection.execute(
            sa.text(
                f"INSERT INTO jobs ({', '.join(names)}) "  # noqa: S608 - column names
                "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :number) "
                f"SELECT {', '.join(replaced.get(name, name) for name in names)} "
                "FROM n, (SELECT * FROM jobs WHERE id = :template)"
            ),
            {"number": number, "template": template},
        )
    database.close()


def trainer_of(service: int) -> int:
    """The process id of the service's training worker; 0 while there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if parent == service and b"tuneship.training" in command:
            return int(folder.name)
    return 0


async def measure(services: list[FilledService], rounds: int, requests: int) -> None:
    """Measure every kind of request on the services alternately."""
    for number in range(rounds + 1):
        for kind in CHECKS:
            for service in services:
                share = requests // 10 if kind == "list, middle page" else requests
                await service.round(kind, max(CLIENTS, share))
                if number == 0:  # the first round only warms up
                    service.spans[kind].clear()
                    service.rates[kind].clear()
                    service.cpu[kind].clear()


def report(services: list[FilledService]) -> None:
    """Print a line for each kind and service, and their ratio."""
    print(
        f"{CLIENTS} clients{'':18} {'p50 ms':>8} {'p95 ms':>8} {'per second':>11} {'CPU ms each':>12}"
    )
    for kind in CHECKS:
        medians: list[float] = []
        computed: list[float] = []
        for service in services:
            spans = sorted(service.spans[kind])
            medians.append(statistics.median(spans))
            p95, rate = spans[int(0.95 * len(spans))], statistics.median(service.rates[kind])
            name = f"{kind}, {service.number:,} jobs"
            computed.append(statistics.median(service.cpu[kind]))
            print(f"{name:28} {medians[-1]:8.1f} {p95:8.1f} {rate:11.0f} {computed[-1]:12.2f}")
        beside = f"{medians[-1] / medians[0]:8.2f} x {computed[-1] / computed[0]:29.2f} x"
        print(f"{kind:28} {beside}")


def main() -> None:
    """Fill, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs=2, default=[10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=640, help="of each kind in a round")
    chosen = parser.parse_args()
    UNLIMITED.update(OWN_JOBS)
    with tempfile.TemporaryDirectory() as folder:
        services = [FilledService(number, Path(folder) / str(number)) for number in chosen.jobs]
        try:
            for service in services:
                service.data_dir.mkdir()
                service.fill()
            asyncio.run(measure(services, chosen.rounds, chosen.requests))
            report(services)
        finally:
            for service in services:
                if service.paused:
                    os.kill(service.paused, signal.SIGCONT)
                if service.process is not None:
                    stop(service.process)


if __name__ == "__main__":
    main()
