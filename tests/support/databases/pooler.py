"""PgBouncer before the Postgres of the tests: it lends each of its few connections for one transaction."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.databases.postgres_cluster import Cluster, unprivileged
from tests.support.waiting import until
from tuneship.processes.launch import die_with_parent

# It names the socket in a private folder: nobody else can be there.
PORT = 6432
# So few that the transactions of two members have to share them.
SESSIONS = 6


def pgbouncer() -> str | None:
    """Find the program; None where there is none."""
    return shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")


class Pooler:
    """A running PgBouncer in transaction mode."""

    def __init__(self, program: str, cluster: Cluster, folder: Path, settings: str) -> None:
        self._folder = folder
        owner = unprivileged()
        if owner:
            os.chown(folder, owner["user"], owner["group"])
        file = folder / "pgbouncer.ini"
        file.write_text(
            f"[databases]\n* = host={cluster.folder} user=tuneship\n[pgbouncer]\npool_mode = transaction\n"
            f"listen_addr =\nlisten_port = {PORT}\nunix_socket_dir = {folder}\nauth_type = any\n"
            f"default_pool_size = {SESSIONS}\nmax_client_conn = 400\n{settings}\n"
        )
        file.chmod(0o644)  # an earlier test may have let nobody else read new files
        parent = os.getpid()
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [program, str(file)],
                stdout=log, stderr=log, cwd=folder, **owner,
                preexec_fn=lambda: die_with_parent(parent, signal.SIGINT),  # noqa: PLW1509 - it only calls prctl
            )  # fmt: skip
        until(self._listens)

    def _listens(self) -> bool:
        assert self.process.poll() is None, (self._folder / "log").read_text()[-2000:]
        return (self._folder / f".s.PGSQL.{PORT}").exists()

    def url(self, direct: str) -> str:
        """The URL by which the database at a URL is reached through the pooler."""
        database = direct.partition("?")[0].rpartition("/")[2]
        return f"postgresql+psycopg://tuneship@/{database}?host={self._folder}&port={PORT}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(120)


@contextmanager
def pooler_before(cluster: Cluster, settings: str = "") -> Iterator[Pooler]:
    """Start a pooler with further `settings`; skips the test where PgBouncer is missing."""
    program = pgbouncer()
    if program is None:
        pytest.skip("no PgBouncer on this machine: .ci/run installs it")
    with tempfile.TemporaryDirectory(prefix="tuneship-pooler-") as folder:
        started = Pooler(program, cluster, Path(folder), settings)
        try:
            yield started
        finally:
            started.stop()
