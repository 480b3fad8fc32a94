"""The composition root of the service: builds the parts from settings and runs them until a signal.

One service per data directory (a lock says so). What it prints on standard output is one line, `ready <url>`.
"""

import asyncio
import fcntl
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import uvicorn

from tuneship.contract.jobs import ENDED
from tuneship.metrics.recorder import Recorder
from tuneship.runtime.launch import die_with_parent
from tuneship.runtime.processes import Processes
from tuneship.runtime.replicas import ReplicaPool
from tuneship.service import training_runs
from tuneship.service.access import (
    Keys,
    RateLimits,
    derived_secret,
    read_or_make_secret,
    write_credentials,
    write_private,
)
from tuneship.service.catalogue import Catalogue
from tuneship.service.context import Parts
from tuneship.service.cursors import Cursors
from tuneship.service.http import Border, build_app
from tuneship.service.supervisor import Supervisor
from tuneship.serving.line import ServingError
from tuneship.settings import ServiceSettings
from tuneship.store import endpoint_records, idempotency, leases, tables
from tuneship.store.blobs import Blobs
from tuneship.store.database import Database, sqlite_url
from tuneship.traffic.split import DRAWS

DRAIN_SECONDS = 30
KEEP_ALIVE_SECONDS = 15
"""Longer than clients keep an idle connection (httpx: 5 s): they close first, so no request meets a closed one."""
HEAD_LIMIT = 256 << 10
"""What the HTTP layer reads of a head, so that the border can answer a head above its own limit properly."""
THREADS = 32


logger = logging.getLogger(__name__)


class DirectoryInUse(Exception):
    """Another service runs on the data directory; `<data_dir>/service.json` says where."""


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


@contextmanager
def _locked(data_dir: Path) -> Generator[None]:
    for folder in (data_dir, *(data_dir / name for name in ("blobs", "scratch", "work", "logs"))):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (data_dir / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUse(str(data_dir)) from None
        yield


def serve(settings: ServiceSettings, *, with_parent: int | None = None) -> None:
    """Run until SIGTERM or SIGINT. Raises `DirectoryInUse`, `OSError` (port taken), `CatalogueFault`.

    `with_parent`: end when the process with this id ends (the embedded service of a script).
    """
    os.umask(0o077)
    if with_parent is not None:
        die_with_parent(with_parent, signal.SIGTERM)
    with _locked(settings.data_dir), _listener(settings.host, settings.port) as listener:
        tempfile.tempdir = str(settings.data_dir / "scratch")  # uploads spool here, not in /tmp
        address = f"http://{settings.host}:{listener.getsockname()[1]}"
        asyncio.run(_run(settings, listener, settings.public_url or address))


def _listener(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # asyncio turns Nagle's algorithm off only where the protocol is named: without it every answer waits 40 ms.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    return listener


def _build(settings: ServiceSettings, public_url: str, secret: bytes) -> Parts:
    data_dir = settings.data_dir
    url = settings.database_url
    return Parts(
        settings=settings,
        public_url=public_url.rstrip("/"),
        database=Database(
            url.get_secret_value() if url else sqlite_url(data_dir / "tuneship.sqlite")
        ),
        blobs=Blobs(str(data_dir / "blobs"), data_dir / "scratch"),
        catalogue=Catalogue(settings.model_catalogue),
        recorder=Recorder(),
        replicas=ReplicaPool(Processes(), data_dir / "logs"),
        cursors=Cursors(derived_secret(secret, "cursors")),
        clock=utc_now,
        draw=lambda: random.randrange(DRAWS),  # noqa: S311 - a traffic split is no secret
    )


def _recover(parts: Parts) -> None:
    """No other process works on this data: nothing that a dead one held can still be held."""
    parts.blobs.sweep()
    with parts.database.write() as connection:
        leases.release_all(connection, parts.clock())
        idempotency.release_all(connection)
        endpoint_records.revert_lapsed(connection, parts.clock())
        kept = {
            "datasets": set(connection.scalars(sa.select(tables.datasets.c.id))),
            "models": set(connection.scalars(sa.select(tables.models.c.job_id))),
        }
        alive = tables.jobs.c.status.not_in(ENDED)
        live_jobs = set(connection.scalars(sa.select(tables.jobs.c.id).where(alive)))
    for kind, ids in kept.items():  # files whose row was never committed
        for orphan in parts.blobs.names(kind) - ids:
            parts.blobs.delete(f"{kind}/{orphan}")
    for folder in (parts.settings.data_dir / "work").iterdir():
        if folder.name not in live_jobs:
            training_runs.clear(folder.parent, folder.name)


async def _run(settings: ServiceSettings, listener: socket.socket, public_url: str) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    secret = read_or_make_secret(settings.data_dir / "master.key")
    parts = _build(settings, public_url, secret)
    _recover(parts)
    keys = Keys(parts.database, derived_secret(secret, "keys"), parts.clock)
    owner = f"{socket.gethostname()}:{os.getpid()}"
    supervisor = Supervisor(parts, Processes(), settings.data_dir / "work", owner)
    limits = RateLimits(settings.control_requests_per_minute, settings.generate_requests_per_minute)
    app = build_app(
        Border(parts, keys, limits, supervisor.wake), lifespan=_lifespan(parts, supervisor)
    )
    write_credentials(keys, settings.data_dir / "credentials.json", parts.public_url, parts.clock())
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        http="h11",
        h11_max_incomplete_event_size=HEAD_LIMIT,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    await _Server(config, parts).serve(sockets=[listener])
    parts.database.close()


class _Server(uvicorn.Server):
    """Says where it is as soon as it takes requests."""

    def __init__(self, config: uvicorn.Config, parts: Parts) -> None:
        super().__init__(config)
        self._parts = parts

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            url = self._parts.public_url
            place = json.dumps({"url": url, "pid": os.getpid()}) + "\n"
            write_private(self._parts.settings.data_dir / "service.json", place)
            sys.stdout.write(f"ready {url}\n")
            sys.stdout.flush()


def _lifespan(parts: Parts, supervisor: Supervisor) -> Any:
    @asynccontextmanager
    async def lifespan(_app: object) -> AsyncGenerator[None]:
        tasks = [asyncio.create_task(supervisor.run())]
        if parts.settings.preload_base_models:
            base = parts.catalogue.default
            tasks.append(asyncio.create_task(_preload(parts, base.path)))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await parts.replicas.close()

    return lifespan


async def _preload(parts: Parts, base: Path) -> None:
    """Ready for the first deployment before it is asked for."""
    try:
        await parts.replicas.of(base).ready(None)
    except ServingError as error:  # the deployment that needs it will say so
        logger.warning("the base model could not be loaded: %s", error)
