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
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import sqlalchemy as sa
import uvicorn

from tuneship.contract.jobs import ALIVE
from tuneship.events.addresses import AddressRules
from tuneship.events.attempt import Sender
from tuneship.events.connector import Receivers
from tuneship.events.delivery import Deliverer
from tuneship.events.vault import Vault
from tuneship.metrics.recorder import Recorder
from tuneship.runtime.groups import OpenReplica
from tuneship.runtime.launch import die_with_parent, leave_no_core
from tuneship.runtime.processes import Processes
from tuneship.runtime.replicas import ReplicaPool
from tuneship.runtime.vllm import VllmServer, vllm_replica
from tuneship.runtime.workers import Runtime
from tuneship.service import training_runs
from tuneship.service.access import (
    Keys,
    derived_secret,
    read_or_make_secret,
)
from tuneship.service.audit import HEAD_EVERY_S, sign_head
from tuneship.service.catalogue import Catalogue
from tuneship.service.connections import Connection
from tuneship.service.context import Parts
from tuneship.service.cursors import Cursors
from tuneship.service.http import Border, build_app
from tuneship.service.instance_catalogue import InstanceCatalogue
from tuneship.service.isolation import can_isolate
from tuneship.service.key_keeper import EVERY_S as KEYS_EVERY_S
from tuneship.service.key_keeper import KeyKeeper
from tuneship.service.keyring import keyring_of
from tuneship.service.machine import cache_share
from tuneship.service.periodic import Periodic
from tuneship.service.rates import RateLimits
from tuneship.service.supervisor import Supervisor
from tuneship.serving.line import ServingError
from tuneship.settings import ServiceSettings
from tuneship.store import endpoint_records, idempotency, leases, tables
from tuneship.store.audit import Chain
from tuneship.store.audit_heads import Heads, heads_file
from tuneship.store.belonging import check_belonging, record_belonging
from tuneship.store.blobs import blobs_of
from tuneship.store.database import Database, url_of
from tuneship.store.private_files import write_private
from tuneship.traffic.split import DRAWS

DRAIN_SECONDS = 30
KEEP_ALIVE_SECONDS = 15
"""Longer than clients keep an idle connection (httpx: 5 s): they close first, so no request meets a closed one."""
HEAD_LIMIT = 256 << 10
"""What the HTTP layer reads of a head, so that the border can answer a head above its own limit properly."""
THREADS = 32
POSTGRES_PORT = 5432
FORGET_EVERY_S = 1.0


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
    """Run until SIGTERM or SIGINT.

    Raises `DirectoryInUse`, `OSError` (port taken), `CatalogueFault`, `MasterKeyDamaged`.

    `with_parent`: end when the process with this id ends (the embedded service of a script).
    """
    os.umask(0o077)
    leave_no_core()
    if with_parent is not None:
        die_with_parent(with_parent, signal.SIGTERM)
    with _locked(settings.data_dir), listener_on(settings.host, settings.port) as listener:
        tempfile.tempdir = str(settings.data_dir / "scratch")  # uploads spool here, not in /tmp
        scheme = "http" if settings.tls_certificate is None else "https"
        address = f"{scheme}://{settings.host}:{listener.getsockname()[1]}"
        asyncio.run(_run(settings, listener, settings.public_url or address))


def listener_on(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises `OSError`, which names both."""
    with ExitStack() as opened:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # asyncio turns Nagle's algorithm off only where the protocol is named: without it answers wait 40 ms.
            listener = opened.enter_context(socket.socket(family, kind, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            place = f"{host} port {port}: {error.strerror} (--host and --port choose others)"
            raise OSError(error.errno, place) from None
        opened.pop_all()
    return listener


def address_rules(settings: ServiceSettings, own_port: int) -> AddressRules:
    """What webhooks may reach; never the service itself or its database."""
    ports = {own_port}
    if settings.database_url is not None:
        database = sa.make_url(settings.database_url.get_secret_value())
        ports.add(database.port or POSTGRES_PORT)
    return AddressRules(
        settings.webhook_allow_cidrs,
        frozenset(host.lower() for host in settings.webhook_allow_http_hosts),
        frozenset(ports),
    )


def _build(
    settings: ServiceSettings,
    url: str,
    secret: bytes,
    place: tuple[socket.socket, str],
    *,
    isolates: bool,
) -> Parts:
    data_dir, (listener, public_url) = settings.data_dir, place
    runtime, catalogue = Processes(isolated=isolates), Catalogue(settings.model_catalogue)
    others = _other_engines(settings, catalogue, runtime)
    return Parts(
        settings=settings,
        public_url=public_url.rstrip("/"),
        database=Database(url),
        blobs=blobs_of(data_dir),
        catalogue=catalogue,
        instances=InstanceCatalogue(settings.instance_catalogue),
        recorder=Recorder(),
        replicas=ReplicaPool(runtime, data_dir / "logs", others, partial(_cache_bytes, settings)),
        cursors=Cursors(derived_secret(secret, "cursors")),
        receivers=Receivers(address_rules(settings, listener.getsockname()[1])),
        vault=Vault(derived_secret(secret, "vault")),
        keyring=keyring_of(secret),
        audit=Chain(derived_secret(secret, "audit")),
        isolates=isolates,
        clock=utc_now,
        draw=lambda: random.randrange(DRAWS),  # noqa: S311 - a traffic split is no secret
    )


def _other_engines(
    settings: ServiceSettings, catalogue: Catalogue, runtime: Runtime
) -> dict[Path, OpenReplica]:
    """By base model directory: those that vLLM serves, as the catalogue says."""
    command, patience_s = settings.vllm_command, settings.vllm_start_timeout_s
    return {
        base.path: vllm_replica(runtime, VllmServer(command, base.runtime_options, patience_s))
        for base in catalogue
        if base.runtime == "vllm"
    }


def _cache_bytes(settings: ServiceSettings, base: Path) -> int:
    return settings.replica_cache_bytes or cache_share(base, settings.replica_processes)


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
        alive = tables.jobs.c.status.in_(ALIVE)
        live_jobs = set(connection.scalars(sa.select(tables.jobs.c.id).where(alive)))
    for kind, ids in kept.items():  # files whose row was never committed
        for orphan in parts.blobs.names(kind) - ids:
            parts.blobs.delete(f"{kind}/{orphan}")
    for folder in (parts.settings.data_dir / "work").iterdir():
        if folder.name not in live_jobs:
            training_runs.clear(folder.parent, folder.name)


async def _run(settings: ServiceSettings, listener: socket.socket, public_url: str) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    secret = read_or_make_secret(settings.master_key)
    url = url_of(settings.database_url, settings.data_dir)
    check_belonging(
        settings.data_dir, url
    )  # before a database that is not ours is opened and migrated
    isolates = await asyncio.to_thread(can_isolate)
    parts = _build(settings, url, secret, (listener, public_url), isolates=isolates)
    parts.database.claim()
    with parts.database.read() as connection:
        parts.keyring.check(connection)
    record_belonging(settings.data_dir, url)
    _recover(parts)
    keys = Keys(parts.database, derived_secret(secret, "keys"), parts.clock, parts.audit)
    owner = f"{socket.gethostname()}:{os.getpid()}"
    supervisor = Supervisor(parts, Processes(isolated=isolates), settings.data_dir / "work", owner)
    limits = RateLimits(
        settings.control_requests_per_minute, settings.generate_requests_per_minute, parts.clock
    )
    failed = "the database's log could not be shortened"
    forgetting = Periodic(lambda: parts.keyring.forget(parts.database), FORGET_EVERY_S, failed)
    keepers = (supervisor, _key_keeper(parts, keys), _head_signer(parts, secret), forgetting)
    app = build_app(
        Border(parts, keys, limits, supervisor.wake), lifespan=_lifespan(parts, keepers)
    )
    await _Server(server_config(app, settings), parts).serve(sockets=[listener])
    parts.database.close()


def _key_keeper(parts: Parts, keys: Keys) -> Periodic:
    credentials = parts.settings.data_dir / "credentials.json"
    keeper = KeyKeeper(keys, credentials, parts.public_url, parts.clock)
    keeper.tend()  # the first key is there before the first request
    return Periodic(keeper.tend, KEYS_EVERY_S, "the keys could not be kept")


def _head_signer(parts: Parts, secret: bytes) -> Periodic:
    file = heads_file(parts.settings.audit_heads, parts.settings.data_dir)
    heads = Heads(file, derived_secret(secret, "audit heads"))
    failed = "the head of the audit chain could not be signed"
    return Periodic(lambda: sign_head(parts.database, heads, parts.clock()), HEAD_EVERY_S, failed)


def server_config(app: Any, settings: ServiceSettings) -> uvicorn.Config:
    """How the HTTP server is set up: everything that it would do by itself is the border's.

    TLS is Python's default for servers: 1.2 and newer. Nobody's X-Forwarded-For is believed but a declared proxy's.
    """
    return uvicorn.Config(
        app,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=[str(network) for network in settings.trusted_proxies],
        log_config=None,
        access_log=False,
        server_header=False,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=HEAD_LIMIT,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,  # after the drain: what has not ended by then is cut off
    )


class _Server(uvicorn.Server):
    """Says where it is as soon as it takes requests, and at a signal answers 503 until the last one is done."""

    def __init__(self, config: uvicorn.Config, parts: Parts) -> None:
        super().__init__(config)
        self._parts = parts
        self._drained_by: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the drain, the second ends it."""
        if self._parts.drain.has_begun:
            super().handle_exit(sig, frame)
            return
        self._parts.drain.begin()
        self._drained_by = time.monotonic() + DRAIN_SECONDS

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self._drained_by is not None and (
            not self.server_state.tasks or time.monotonic() > self._drained_by
        ):
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            url = self._parts.public_url
            place = json.dumps({"url": url, "pid": os.getpid()}) + "\n"
            write_private(self._parts.settings.data_dir / "service.json", place)
            sys.stdout.write(f"ready {url}\n")
            sys.stdout.flush()


class Keeper(Protocol):
    """A background task of the service, until it is cancelled."""

    async def run(self) -> None: ...


def _lifespan(parts: Parts, keepers: Sequence[Keeper]) -> Any:
    @asynccontextmanager
    async def lifespan(_app: object) -> AsyncGenerator[None]:
        sender = Sender(parts.receivers)
        deliverer = Deliverer(parts.database, parts.vault, sender, parts.clock, random.random)
        tasks = [asyncio.create_task(one.run()) for one in (*keepers, deliverer)]
        if parts.settings.preload_base_models:
            base = parts.catalogue.default
            tasks.append(asyncio.create_task(_preload(parts, base.path)))
        yield
        parts.halted.set()
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
