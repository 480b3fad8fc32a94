"""The composition root of the service: builds the parts from settings and runs them until a signal.

A lock allows one service per data directory, and another one per database, unless they are members of a cluster
(`membership.py`). It prints one line on standard output, `ready <url>`.
"""

import asyncio
import faulthandler
import fcntl
import logging
import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tuneship.agents.agent_replicas import AgentReplicas, ReplicaOrders
from tuneship.agents.agent_starter import AgentStarter
from tuneship.events.addresses import AddressRules
from tuneship.events.attempt import Sender
from tuneship.events.connector import Receivers
from tuneship.events.delivery import Deliverer
from tuneship.host.gpus import GpuLeases
from tuneship.host.interpreter import known_fault
from tuneship.host.open_files import connection_limit, raise_file_limit
from tuneship.host.startup import StartupError
from tuneship.host.thread_pools import Threads, use_large_stacks
from tuneship.isolation.isolation import hide
from tuneship.metrics.recorder import Recorder
from tuneship.processes.forked_workers import ForkedProcesses
from tuneship.processes.launch import die_with_parent, leave_no_core
from tuneship.processes.worker_protocol import Runtime
from tuneship.replicas.engine_kinds import VLLM_ENGINE
from tuneship.replicas.replica import StartReplica
from tuneship.replicas.replica_groups import ReplicaGroups
from tuneship.replicas.replica_link import NotStartedYet
from tuneship.replicas.vllm import vllm_starter
from tuneship.security.master_key import derived_secret
from tuneship.security.vault import Vault
from tuneship.service.access.api_keys import Keys
from tuneship.service.access.capabilities import capabilities_of
from tuneship.service.access.console_sessions import ConsoleSessions, session_rules
from tuneship.service.access.data_keys import keyring_of
from tuneship.service.access.isolation import can_isolate
from tuneship.service.access.key_keeper import EVERY_S as KEYS_EVERY_S
from tuneship.service.access.key_keeper import KeyKeeper
from tuneship.service.all_handlers import OPENAI_SERVED, SERVED
from tuneship.service.background.clock_watch import ClockWatch, utc_now
from tuneship.service.background.periodic import Periodic
from tuneship.service.background.shutdown import TASKS_END_S, end_tasks, leave
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.catalogues.instance_types import InstanceCatalogue
from tuneship.service.catalogues.origins import added_folder
from tuneship.service.cluster.leadership import BackgroundTask, Leadership, Led
from tuneship.service.cluster.membership import Membership, alone, member
from tuneship.service.cluster.shared_replicas import SharedReplicas
from tuneship.service.composition import BackgroundParts, shared_replicas, supervisor_of
from tuneship.service.context.cursors import Cursors
from tuneship.service.context.parts import Parts
from tuneship.service.context.timing import ServiceTiming
from tuneship.service.events.audit import HEAD_EVERY_S, LINK_EVERY_S, sign_head
from tuneship.service.http import Boundary, build_app
from tuneship.service.http.console import console
from tuneship.service.http.openai import OPENAI
from tuneship.service.http.rate_limits import RateLimits
from tuneship.service.http.shared_rate_limits import SharedRateLimits
from tuneship.service.monitoring.otlp_spans import tracing_of
from tuneship.service.open_installation import Installation, open_for_member, open_for_service
from tuneship.service.own_replicas import agent_starters, check_ray, replica_starter, vllm_server
from tuneship.service.own_trainings import training_agents
from tuneship.service.recovery import recover, recover_member
from tuneship.service.service_server import ServiceServer, server_config
from tuneship.serving.replica_client import ServingError
from tuneship.settings import ServiceSettings
from tuneship.store.database.database import IN_USE, Database, ports_of, url_of
from tuneship.store.installation.ownership import name_of
from tuneship.store.records.audit import Chain
from tuneship.store.records.audit_heads import Heads, heads_file
from tuneship.traffic.split import DRAWS

REPLICAS_END_S = 4.0
# A collector that does not answer must not delay the end.
TRACING_END_S = 2.0
# The event loop's own pool. Handlers have threads of their own (`context/fair_threads.py`), and so
# has background work (`tuneship/host/thread_pools.py`).
SPARE_THREADS = 32
# The interval after which a computing thread lets the event loop run. Python's five milliseconds,
# times the number of computing threads, would delay every answer.
SWITCH_INTERVAL_S = 0.0005
FOLDERS = ("blobs", "scratch", "work", "logs", "base_models")
FORGET_EVERY_S = 1.0
STDERR = 2
NOTE_TIME_EVERY_S = 60.0


logger = logging.getLogger(__name__)


class DirectoryInUse(StartupError):
    """Another service runs on the data directory; `<data_dir>/service.json` says where."""

    exit_code = IN_USE

    def __init__(self, data_dir: Path) -> None:
        super().__init__(f"another service runs on {data_dir}")


@contextmanager
def locked(data_dir: Path) -> Generator[None]:
    """Create the data directory, close it to other users, and hold its lock. Raises `StartupError`."""
    for folder in (data_dir, *(data_dir / name for name in FOLDERS)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not folder.stat().st_mode & 0o077:
            continue
        try:
            folder.chmod(0o700)
        except PermissionError:
            text = f"{folder} is open to other users, and belongs to another user: make it yours, and 0700"
            raise StartupError(text) from None
        logger.warning("%s was open to other users; now it is closed to them (0700)", folder)
    with (data_dir / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUse(data_dir) from None
        yield


def serve(
    settings: ServiceSettings,
    *,
    with_parent: int | None = None,
    accept_clock: bool = False,
    timing: ServiceTiming | None = None,
) -> None:
    """Run until SIGTERM or SIGINT. Raises `StartupError`, `OSError` (port taken) and SQLAlchemy's errors.

    `with_parent`: end when the process with this id ends (the embedded service of a script).
    `accept_clock`: start although the clock is behind the newest time that the service has recorded.
    """
    os.umask(0o077)
    leave_no_core()
    # The stacks of all threads at a crash, and when the guard ends the process.
    faulthandler.enable(STDERR)
    use_large_stacks()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    hide()  # before the master key is read
    if with_parent is not None:
        die_with_parent(with_parent, signal.SIGTERM)
    with locked(settings.data_dir), listener_on(settings.host, settings.port) as listener:
        if (fault := known_fault()) is not None:
            logger.warning(fault)
        tempfile.tempdir = str(settings.data_dir / "scratch")  # uploads spool here, not in /tmp
        scheme = "http" if settings.tls_certificate is None else "https"
        address = f"{scheme}://{settings.host}:{listener.getsockname()[1]}"
        check_ray(settings)
        if settings.cluster is None:
            opened = open_for_service(settings, utc_now(), accept_clock=accept_clock)
        else:
            opened = open_for_member(settings, settings.cluster, accept_clock=accept_clock)
        place = listener, settings.public_url or address
        asyncio.run(_run(settings, opened, place, timing or ServiceTiming()))


def listener_on(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises `OSError`, which names host and port."""
    with ExitStack() as opened:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # asyncio turns Nagle's algorithm off only where the protocol is named; with it answers
            # wait 40 ms.
            listener = opened.enter_context(socket.socket(family, kind, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            place = f"{host} port {port}: {error.strerror} (--host and --port choose others)"
            raise OSError(error.errno, place) from None
        opened.pop_all()
    return listener


def address_rules(settings: ServiceSettings, own_port: int) -> AddressRules:
    """The addresses that webhooks may reach: never the service itself or its database."""
    ports = {own_port}
    if settings.database_url is not None:
        ports |= ports_of(settings.database_url.get_secret_value())
    if settings.listen_url is not None:
        ports |= ports_of(settings.listen_url)
    return AddressRules(
        settings.webhook_allow_cidrs,
        frozenset(host.lower() for host in settings.webhook_allow_http_hosts),
        frozenset(ports),
    )


def _build(
    settings: ServiceSettings,
    opened: Installation,
    place: tuple[socket.socket, str],
    workers: tuple[Runtime, bool],
    timing: ServiceTiming,
    role: Membership,
) -> tuple[Parts, Keys, BackgroundParts, SharedReplicas | None]:
    """Build the service. `workers`: starts worker processes, and knows whether they are isolated."""
    data_dir, secret, (listener, public_url) = settings.data_dir, opened.secret, place
    (runtime, isolates), gpus = workers, GpuLeases()
    catalogue = Catalogue(settings.model_catalogue, added_folder(data_dir))
    instances = InstanceCatalogue(settings.instance_catalogue)
    for base in catalogue:
        instances.of_replicas(base)  # refuses an unknown type
    vllm_starters: dict[Path, StartReplica] = {
        base.path: vllm_starter(runtime, vllm_server(settings, base), gpus)
        for base in catalogue
        if base.engine is VLLM_ENGINE and settings.agents == "none"  # else an agent runs it
    }

    own = replica_starter(settings, secret, runtime, (catalogue, instances), isolates=isolates)
    sharing: tuple[ReplicaOrders, Callable[[], AgentStarter]] | None = None
    shared_group: Callable[[Path], AgentReplicas] | None = None
    if settings.cluster is not None and settings.agents != "none":
        make_starter = agent_starters(
            settings, secret, runtime, (catalogue, instances), role.clock, isolates=isolates
        )
        orders = ReplicaOrders(lambda: role.leadership.leads)
        sharing = orders, make_starter
        shared_group = partial(AgentReplicas, orders=orders, attach=make_starter().connect)
    chain = Chain(derived_secret(secret, "audit"))
    keys = Keys(opened.database, derived_secret(secret, "keys"), role.clock, chain)
    parts = Parts(
        settings=settings,
        public_url=public_url.rstrip("/"),
        database=opened.database,
        blobs=opened.blobs,
        catalogue=catalogue,
        instances=instances,
        # The members of a cluster count a caller once, so they need one key.
        recorder=Recorder(derived_secret(secret, "callers") if settings.cluster else None),
        replicas=ReplicaGroups(
            own,
            data_dir / "logs",
            vllm_starters,
            is_own_here=settings.agents != "ray",
            shared_group=shared_group,
        ),
        cursors=Cursors(derived_secret(secret, "cursors")),
        receivers=Receivers(address_rules(settings, listener.getsockname()[1])),
        vault=Vault(derived_secret(secret, "vault")),
        keyring=keyring_of(secret),
        audit=chain,
        audit_heads=Heads(
            heads_file(settings.audit_heads, data_dir), derived_secret(secret, "audit heads")
        ),
        sessions=ConsoleSessions(
            opened.database,
            keys,
            derived_secret(secret, "console"),
            (chain, role.clock),
            session_rules(settings),
        ),
        capabilities=capabilities_of(settings, isolates=isolates),
        clock=role.clock,
        notifier=role.notifier,
        member_number=role.number,
        timing=timing,
        tracing=tracing_of(settings),
        draw=lambda: random.randrange(DRAWS),  # noqa: S311 - a traffic split is no secret
    )
    background = BackgroundParts(
        runtime=runtime,
        work=data_dir / "work",
        owner=own_name(),
        clock_watch=ClockWatch(role.clock, last_seen=opened.last_seen),
        gpus=gpus,
        training_agents=training_agents(settings, secret, runtime, isolates=isolates),
    )
    shared = None if sharing is None else shared_replicas(parts, *sharing, role.name)
    return parts, keys, background, shared


def own_name() -> str:
    """The name of this process in rows."""
    return f"{socket.gethostname()}:{os.getpid()}"


async def _run(
    settings: ServiceSettings,
    opened: Installation,
    place: tuple[socket.socket, str],
    timing: ServiceTiming,
) -> None:
    spare = ThreadPoolExecutor(SPARE_THREADS, "spare")
    asyncio.get_running_loop().set_default_executor(spare)
    connections = connection_limit(settings, raise_file_limit())
    isolates = await asyncio.to_thread(can_isolate, settings)
    role = alone() if settings.cluster is None else member(opened.database, own_name())
    log = settings.data_dir / "logs" / "fork-server.log"
    processes = ForkedProcesses(isolated=isolates, log=log)
    parts, keys, background, shared = _build(
        settings, opened, place, (processes, isolates), timing, role
    )
    if settings.cluster is None:
        recover(parts, background.training_agents)
    else:
        recover_member(parts)
    per_minute = settings.control_requests_per_minute, settings.generate_requests_per_minute
    if settings.cluster is None:
        limits = RateLimits(*per_minute, parts.clock)
    else:
        limits = SharedRateLimits(*per_minute, parts.clock, parts.database)
    supervisor = supervisor_of(parts, background, limits.take_spare, role.leadership, shared)
    own = _periodic_tasks(parts, keys)
    leader = _leader_tasks(parts, role.leadership, background.clock_watch)
    tasks = (supervisor, *own, *leader, *_sharing_tasks(parts.database, role, shared), *role.tasks)
    app = build_app(
        (*SERVED.values(), *(OPENAI_SERVED.values() if settings.openai else ())),
        Boundary(parts, keys, limits, is_fit=role.is_fit),
        dialects=[*([console()] if settings.console else ()), OPENAI],
        lifespan=_lifespan(parts, tasks),
    )
    database = name_of(url_of(settings.database_url, settings.data_dir), settings.data_dir)
    text = "tuneship %s at %s, data in %s, database: %s, files: %s"
    places = (settings.data_dir, database, parts.blobs.place)
    logger.info(text, version("tuneship"), parts.public_url, *places)
    await ServiceServer(server_config(app, settings), parts, connections).serve(sockets=[place[0]])
    processes.close()
    parts.database.close()
    if parts.tracing is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(TRACING_END_S):
                await Threads("last spans", 1).run(parts.tracing.close)
    await leave(spare, parts.threads.dismiss)


def _periodic_tasks(parts: Parts, keys: Keys) -> tuple[Periodic, ...]:
    """The periodic work of every service."""
    credentials = parts.settings.data_dir / "credentials.json"
    keeper = KeyKeeper(keys, credentials, parts.public_url, parts.clock)
    # The first key of a cluster lies on the machine of its first member.
    is_elsewhere = (
        parts.settings.cluster is not None and not credentials.is_file() and keys.listed()
    )
    keep = keys.store_uses if is_elsewhere else keeper.run_due
    keep()  # the first key must be there before the first request
    return (
        Periodic(
            parts.sessions.store_uses, KEYS_EVERY_S, "uses of the console could not be stored"
        ),
        Periodic(keep, KEYS_EVERY_S, "the keys could not be kept"),
        Periodic(
            lambda: parts.keyring.forget(parts.database),
            FORGET_EVERY_S,
            "the database's log could not be shortened",
            lambda: parts.keyring.has_remains,
        ),
    )


def _leader_tasks(parts: Parts, leadership: Leadership, clock_watch: ClockWatch) -> tuple[Led, ...]:
    """The leader's tasks beside those of the supervisor."""

    def delivering(database: Database) -> Deliverer:
        sender = Sender(parts.receivers)
        return Deliverer(database, parts.vault, sender, parts.clock, random.random)

    def signing(database: Database) -> Periodic:
        def sign() -> None:
            now = parts.clock()
            parts.audit.link_all(database)  # the head stands for all of it
            sign_head(database, parts.audit_heads, now)
            parts.signed_audit.complete_at = now

        return Periodic(sign, HEAD_EVERY_S, "the head of the audit chain could not be signed")

    def noting(database: Database) -> Periodic:
        return Periodic(
            lambda: clock_watch.note_time(database),
            NOTE_TIME_EVERY_S,
            "the newest time could not be kept",
        )

    def linking(database: Database) -> Periodic:
        return Periodic(
            lambda: parts.audit.link_all(database),
            LINK_EVERY_S,
            "the audit chain could not be linked",
        )

    # SQLite links a row when it is written.
    makers = (delivering, signing, noting, *(() if parts.database.is_sqlite else (linking,)))
    return tuple(Led(leadership, parts.database, make) for make in makers)


def _sharing_tasks(
    database: Database, role: Membership, shared: SharedReplicas | None
) -> tuple[BackgroundTask, ...]:
    """The tasks of a member whose replicas run on agents."""
    if shared is None:
        return ()
    keeping = Led(role.leadership, database, shared.keeper)
    return (shared.attached, shared.demand, keeping)


def _lifespan(parts: Parts, background: Sequence[BackgroundTask]) -> Any:
    async def preload(base: Path) -> None:
        # The base model is ready before the first deployment needs it.
        try:
            await parts.replicas.of(base).ready(None)
        except NotStartedYet:  # the leader will
            return
        except ServingError as error:  # a deployment that needs the model reports the error too
            logger.warning("the base model could not be loaded: %s", error)

    @asynccontextmanager
    async def lifespan(_app: object) -> AsyncGenerator[None]:
        tasks = [asyncio.create_task(task.run()) for task in background]
        if parts.settings.preload_base_models:
            tasks.append(asyncio.create_task(preload(parts.catalogue.default.path)))
        yield
        parts.halted.set()
        await end_tasks(tasks, TASKS_END_S)
        try:
            async with asyncio.timeout(REPLICAS_END_S):
                await parts.replicas.close()
        except TimeoutError:  # the kernel ends it with this process
            logger.warning("a replica does not end and is left behind")

    return lifespan
