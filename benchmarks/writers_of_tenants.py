"""Measures creates per second of several processes on one PostgreSQL, a lock for each tenant beside one lock for all.

    python benchmarks/writers_of_tenants.py

Each process writes what the creation of a job writes, through the service's own code: checked quota, row, counter, data
keys, log, event and audit row. The database is reached through a proxy that delays each message, as a network would.
Rounds of both ways take turns. Before a figure is printed, every row, counter, event number and audit row is checked.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import sqlalchemy as sa

from tests.support.job_rows import queued_job
from tests.support.postgres_cluster import DURABLE, Cluster, programs
from tuneship.service.access.data_keys import Keyring
from tuneship.store.database import queries as rows
from tuneship.store.database import tables
from tuneship.store.database.database import Database
from tuneship.store.database.identifiers import new_id
from tuneship.store.records import audit, job_records, outbox
from tuneship.store.records.audit import AuditRecord, Chain

CHAIN, KEYRING = Chain(b"c" * 32), Keyring(b"k" * 32)
# More than any tenant gets, since what is measured is not the refusal.
QUOTA = 1_000_000
BLOCK = 1 << 16


@dataclass(frozen=True)
class Order:
    """The work of one process in one round."""

    url: str
    process: int
    tenants: int
    seconds: float
    is_global: bool


@dataclass
class Rounds:
    """Creates per second of one way, by round."""

    name: str
    rates: list[float] = field(default_factory=list[float])

    def __str__(self) -> str:
        """One line for people."""
        spread = f"{min(self.rates):.0f} to {max(self.rates):.0f}"
        return f"{self.name}: {median(self.rates):.0f} creates a second ({spread})"


def main() -> None:
    """Measure in turns, check, then print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--away-ms", type=float, default=0.5, help="of a round trip")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work is not None:
        sys.stdout.write(json.dumps(work(Order(**json.loads(chosen.work)))) + "\n")
        return
    found = programs()
    if found is None:
        sys.stdout.write("cannot run here: no PostgreSQL on this machine\n")
        return
    cluster = Cluster(found, DURABLE)
    try:
        _measure(cluster, chosen)
    finally:
        cluster.remove()


def _measure(cluster: Cluster, chosen: argparse.Namespace) -> None:
    ways = {True: Rounds("one lock for all"), False: Rounds("a lock for each tenant")}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(chosen.rounds):
            for is_global, way in ways.items():
                url = cluster.new_database()
                with delayed(cluster, url, chosen.away_ms / 2_000, Path(folder)) as far:
                    orders = [
                        Order(far, number, chosen.tenants, chosen.seconds, is_global)
                        for number in range(chosen.processes)
                    ]
                    made, in_time = run(orders)
                check(url, made)
                way.rates.append(in_time / chosen.seconds)
    text = "%d processes, %d tenants, a round trip of %.1f ms more, %d rounds of %.0f s\n"
    numbers = (chosen.processes, chosen.tenants, chosen.away_ms, chosen.rounds, chosen.seconds)
    sys.stdout.write(text % numbers)
    for way in ways.values():
        sys.stdout.write(f"{way}\n")
    ratios = [each / one for one, each in zip(ways[True].rates, ways[False].rates, strict=True)]
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    sys.stdout.write(f"ratio: {median(ratios):.1f} ({spread})\n")


def run(orders: Sequence[Order]) -> tuple[Counter[str], int]:
    """Run the processes at once; returns the creates of each tenant, and how many of all were within the time."""
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--work", json.dumps(asdict(order))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for order in orders
    ]
    is_ready = [bool(process.stdout and process.stdout.readline()) for process in started]
    made, in_time = Counter[str](), 0
    for process in started:
        if process.stdin is not None:
            process.stdin.write("go\n")
            process.stdin.flush()
    for process, ready in zip(started, is_ready, strict=True):
        said, _ = process.communicate()
        if process.returncode or not ready:
            raise SystemExit("a process failed: there are no figures")
        for tenant, (number, counted) in json.loads(said).items():
            made[tenant] += number
            in_time += counted
    return made, in_time


def work(order: Order) -> dict[str, tuple[int, int]]:
    """Create once for each tenant, then in a thread for each until the time is over.

    Returns, by tenant, the number of all creates and of those within the time.
    """
    names = [f"tenant{number}" for number in range(order.tenants)]

    def create_all(tenant: str) -> tuple[int, int]:
        end = time.monotonic() + order.seconds
        number, in_time = 1, 0
        while time.monotonic() < end:
            create(database, tenant, order)
            number += 1
            in_time += time.monotonic() < end
        return number, in_time

    with (
        closing(Database(order.url)) as database,
        ThreadPoolExecutor(order.tenants) as threads,
    ):
        # Every connection and every statement is ready before the time begins.
        list(threads.map(lambda name: create(database, name, order), names))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        return dict(zip(names, threads.map(create_all, names), strict=True))


def create(database: Database, tenant: str, order: Order) -> None:
    """Write what the creation of a job writes, in one transaction."""
    now, identifier = datetime.now(UTC), new_id("ft")
    row = queued_job(identifier, client_id=tenant, created_at=now, updated_at=now)
    with database.write(None if order.is_global else tenant) as connection:
        is_own = (tables.jobs.c.client_id == tenant) & (tables.jobs.c.status == "queued")
        if rows.count(connection, tables.jobs, is_own) >= QUOTA:
            raise SystemExit("the quota is reached")
        stored = rows.insert(connection, tables.jobs, row)
        for kind in ("jobs", "models"):
            KEYRING.make(connection, tenant, f"{kind}/{identifier}", now)
        outbox.emit(connection, "fine_tuning.job.queued", stored, now)
        outbox.emit(connection, "fine_tuning.job.queued", {**stored, "id": tenant}, now)
        job_records.add_log(connection, identifier, now, "info", "job queued")
        entry = AuditRecord(now, tenant, "k", "create_job", identifier, 201, "::1", "req")
        CHAIN.add(connection, entry)


def check(url: str, made: Counter[str]) -> None:
    """Exit unless exactly the acknowledged creates are stored, numbered and audited."""
    with closing(Database(url)) as database:
        CHAIN.link_all(database)
        with database.read() as connection:
            audited = Counter(row["client_id"] for row in audit.rows_of(connection))
            is_right = CHAIN.fault(audit.rows_of(connection)) is None and audited == made
            for tenant, number in made.items():
                query = sa.select(tables.events.c.sequence).where(
                    tables.events.c.resource_id == tenant
                )
                found = list(connection.scalars(query.order_by(tables.events.c.position)))
                stored = rows.count(connection, tables.jobs, tables.jobs.c.client_id == tenant)
                is_right &= found == list(range(1, number + 1)) and stored == number
    if not is_right:
        raise SystemExit("what was written is not what was answered: the figures mean nothing")


@contextmanager
def delayed(cluster: Cluster, url: str, delay_s: float, folder: Path) -> Generator[str]:
    """The URL of the same database behind a process that passes each message, of either side, on after `delay_s`."""
    place = folder / ".s.PGSQL.5432"
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(512)
        child = os.fork()
        if child == 0:
            try:
                pass_on(listener, str(cluster.folder / place.name), delay_s)
            finally:
                os._exit(0)
    try:
        parsed = sa.make_url(url)
        yield parsed.set(query={"host": str(folder)}).render_as_string(hide_password=False)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def pass_on(listener: socket.socket, server: str, delay_s: float) -> None:
    """Accept connections for ever, and pass their messages on."""
    while True:
        near, _ = listener.accept()
        far = socket.socket(socket.AF_UNIX)
        far.connect(server)
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=copy, args=(source, target, delay_s), daemon=True).start()


def copy(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Copy what comes, each piece after the delay, until either side ends."""
    with suppress(OSError):
        while piece := source.recv(BLOCK):
            time.sleep(delay_s)
            target.sendall(piece)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
