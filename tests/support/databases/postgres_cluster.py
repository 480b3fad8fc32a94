"""A Postgres server for the test run: a cluster in a temporary folder, reached through a Unix socket.

It is removed after the run. It may lose data on a power failure (`fsync=off`), because tests kill the service but never
this server. `Cluster.new_database()` copies a migrated template, or empties a database that a test no longer uses.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from deployments.background_processes import NotStarted
from deployments.cluster_parts import postgres_programs
from tuneship.processes.launch import die_with_parent
from tuneship.store.database import tables
from tuneship.store.database.database import Database

SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "400",
    "shared_buffers": "64MB",
    "autovacuum": "off",
}
# For measurements: a server that loses nothing.
DURABLE = {**SETTINGS, "fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
TEMPLATE = "tuneship_template"


def programs() -> Path | None:
    """Find the folder of `initdb` and `postgres`; None where there is none."""
    try:
        return postgres_programs()
    except NotStarted:
        return None


def unprivileged() -> dict[str, Any]:
    """Options of `subprocess` that run Postgres as `nobody` if the tests run as root, which Postgres refuses."""
    if os.getuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


class Cluster:
    """A Postgres server and the databases that tests use on it."""

    def __init__(self, programs: Path, settings: Mapping[str, str] = SETTINGS) -> None:
        self._programs = programs
        self._settings = settings
        self._owner = unprivileged()
        self._numbers, self._blanks = count(1), count(1)
        self._free: list[str] = []
        # Names of the databases that were given to tests, in order.
        self.lent: list[str] = []
        self.folder = Path(tempfile.mkdtemp(prefix="tuneship-postgres-"))
        if self._owner:
            os.chown(self.folder, self._owner["user"], self._owner["group"])
        program, *options = self._maker()
        subprocess.run(
            [str(programs / program), "--pgdata", str(self.folder / "data"), "--no-sync", *options],
            check=True, stdout=subprocess.DEVNULL, cwd=self.folder, **self._owner,
        )  # fmt: skip
        self.start()

    def _maker(self) -> tuple[str, ...]:
        """The program that makes the files of the server, and its options."""
        return (
            "initdb",
            "--username=tuneship",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
        )

    def start(self) -> None:
        options = [f"-c{name}={value}" for name, value in self._settings.items()]
        parent = os.getpid()
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [
                    str(self._programs / "postgres"), "-D", str(self.folder / "data"),
                    "-k", str(self.folder), *options,
                ],
                stdout=log, stderr=log, cwd=self.folder, **self._owner,
                preexec_fn=lambda: die_with_parent(parent, signal.SIGINT),  # noqa: PLW1509 - it only calls prctl
            )  # fmt: skip
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + 120
        while True:
            try:
                self.run("select 1")
            except sa.exc.OperationalError:
                assert time.monotonic() < end, (self.folder / "log").read_text()[-2000:]
                assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """Stop the server at once, without waiting for open sessions."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(120)

    def kill(self) -> None:
        """End all of its processes at once, as a loss of the machine would."""
        number = self.process.pid
        sessions = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        for one in (number, *map(int, sessions)):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self.process.wait(120)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://tuneship@/{database}?host={self.folder}"

    def run(self, statement: str, database: str = "postgres") -> list[Any]:
        """Run one statement outside any transaction and return its rows."""
        engine = sa.create_engine(self.url(database), poolclass=sa.NullPool)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            result = connection.exec_driver_sql(statement)
            return list(result.all()) if result.returns_rows else []

    def new_database(self) -> str:
        """Return the URL of an empty database with all tables."""
        name = self._emptied() if self._free else self._copied(next(self._numbers))
        self.lent.append(name)
        return self.url(name)

    def blank_database(self) -> str:
        """Return the URL of a database without tables, which is not used again."""
        name = f"blank_{next(self._blanks)}"
        self.run(f"create database {name}")
        return self.url(name)

    def _copied(self, number: int) -> str:
        if number == 1:
            self.run(f"create database {TEMPLATE}")
            Database(self.url(TEMPLATE)).close()
        self.run(f"create database tuneship_{number} template {TEMPLATE}")
        return f"tuneship_{number}"

    def _emptied(self) -> str:
        """Empty a database for reuse, because hundreds of copies would take gigabytes."""
        name = self._free.pop()
        # `truncate` would make new files for all tables and indexes, which takes twice as long.
        children_first = reversed(tables.METADATA.sorted_tables)
        statements = [f"delete from {table.name}" for table in children_first]  # noqa: S608 - our tables
        statements.append("select setval(sequencename::regclass, 1, false) from pg_sequences")
        self.run("; ".join(statements), name)
        return name

    def take_back(self, since: int) -> None:
        """Reuse the databases lent since then to which nobody is connected; services shared by tests keep theirs."""
        names = self.lent[since:]
        query = "select datname from pg_stat_activity where datname like 'tuneship_%%'"
        end = time.monotonic() + 0.3  # an ended session stays visible for a moment
        while in_use := {row[0] for row in self.run(query)} & {*names}:
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        self._free += [name for name in names if name not in in_use]

    def refuse(self, url: str, *, refuses: bool) -> None:
        """Make a database refuse connections, or accept them again."""
        name = sa.make_url(url).database
        self.run(f"alter database {name} allow_connections {str(not refuses).lower()}")
        end_sessions = (
            f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"  # noqa: S608 - the name is ours
        )
        while refuses and self.run(end_sessions):  # a session that was being opened appears later
            time.sleep(0.02)


class Standby(Cluster):
    """A server that follows another one and answers readers, until it is promoted."""

    def __init__(self, programs: Path, primary: Cluster) -> None:
        self._primary = primary
        super().__init__(programs)

    def _maker(self) -> tuple[str, ...]:
        primary = ("--host", str(self._primary.folder), "--username=tuneship")
        return "pg_basebackup", *primary, "--write-recovery-conf", "--checkpoint=fast"

    def promote(self) -> None:
        self.run("select pg_promote()")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    found = programs()
    if found is None:
        pytest.skip("no PostgreSQL on this machine: .ci/run installs it")
    cluster = Cluster(found)
    yield cluster
    cluster.remove()
