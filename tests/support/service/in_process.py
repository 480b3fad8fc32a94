"""Run the whole service in a thread of the test's process, with played workers, and call it over ASGI."""

import asyncio
import json
import logging
import random
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as futures_threads
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import h11
import httpx
from pydantic import SecretStr

from tests.support.databases.sqlite_files import new_sqlite
from tests.support.models.conversion import PlayedConversion
from tests.support.service.engines import PlayedEngines
from tests.support.waiting import PATIENCE_S, until
from tuneship.client import AsyncClient
from tuneship.contract.declaring.scopes import SCOPES
from tuneship.events.attempt import Sender
from tuneship.events.connector import Receivers, resolve
from tuneship.events.delivery import Deliverer, DeliveryTiming
from tuneship.host.gpus import GpuLeases
from tuneship.host.thread_pools import where_is, where_waits
from tuneship.metrics.recorder import Recorder
from tuneship.replicas.local_replicas import process_starter
from tuneship.replicas.replica_groups import ReplicaGroups
from tuneship.security.vault import Vault
from tuneship.service.access.api_keys import Keys
from tuneship.service.access.capabilities import capabilities_of
from tuneship.service.access.console_sessions import ConsoleSessions, session_rules
from tuneship.service.access.data_keys import Keyring
from tuneship.service.all_handlers import OPENAI_SERVED, SERVED
from tuneship.service.background.clock_watch import ClockWatch, awake_s
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.catalogues.instance_types import InstanceCatalogue
from tuneship.service.cluster.membership import alone, member
from tuneship.service.composition import BackgroundParts, supervisor_of
from tuneship.service.context.cursors import Cursors
from tuneship.service.context.parts import Parts
from tuneship.service.context.timing import ServiceTiming
from tuneship.service.http import Boundary, build_app
from tuneship.service.http.console import console
from tuneship.service.http.openai import OPENAI
from tuneship.service.http.rate_limits import RateLimits
from tuneship.service.http.sockets.connections import ConnectionTimeouts
from tuneship.service.http.sockets.server import HttpServer, ServerTiming
from tuneship.service.monitoring.otlp_spans import tracing_of
from tuneship.service.serve import address_rules, listener_on
from tuneship.service.service_server import server_config
from tuneship.service.supervisor import Supervisor
from tuneship.settings import ClientSettings, ServiceSettings
from tuneship.store.database.database import SQLITE_FILE, Database, url_of
from tuneship.store.files.open_blobs import blobs_of
from tuneship.store.records.audit import Chain
from tuneship.store.records.audit_heads import HEADS_FILE, Heads

CATALOGUE = Catalogue()
ANSWER = "Diseases of the skin"
LINES = [{"instruction": f"case {number}", "response": "chapter"} for number in range(4)]
OWN_PORT = 8700
FAST = {
    "control_requests_per_minute": 10**6,
    "generate_requests_per_minute": 10**6,
    "concurrent_jobs": 10,
}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


# A test that shares its cores must not lose a connection because it was slow itself.
PATIENT = ConnectionTimeouts(head_s=120.0, keep_alive_s=120.0, keyless_s=240.0, unread_s=240.0)


class Clock:
    """A wall clock and a monotonic clock that a test can move."""

    def __init__(self) -> None:
        # How far the service's clocks run ahead, as if this time had passed.
        self.ahead = timedelta()
        # How far the wall clock has been set forward or back, without time passing.
        self.jumped = timedelta()

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead + self.jumped

    def elapsed(self) -> float:
        return awake_s() + self.ahead.total_seconds()


class Lines(logging.Handler):
    """A handler that keeps all log messages as text."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@dataclass(frozen=True)
class RealParts:
    """Parts of a service that are not played: base models, what starts processes, and conversions."""

    catalogue: Catalogue
    workers: Any
    convert: Any


class Service:
    """A service on a data folder, with the two tenants `alice` and `bob`."""

    def __init__(
        self,
        data_dir: Path,
        *,
        isolates: bool = True,
        timing: ServiceTiming | None = None,
        lease_s: float | None = None,
        training_agents: Any = None,
        real: RealParts | None = None,
        **settings: Any,
    ) -> None:
        """`lease_s`: it is a member of a cluster, where a leader's lease is so short.

        `training_agents`: starts the agents of its trainings, if they are not its own (played) processes. `real`: parts
        in place of the played ones.
        """
        chosen: dict[str, Any] = FAST | settings
        self.settings = ServiceSettings(data_dir=data_dir, **chosen)
        for name in ("work", "logs", "blobs", "scratch"):
            (data_dir / name).mkdir(parents=True, exist_ok=True)
        tokenizer: Any = CATALOGUE.default.tokenizer
        self.engines = PlayedEngines(tokenizer.encode(ANSWER, add_special_tokens=False).ids)
        workers: Any = self.engines if real is None else real.workers
        self.clock = Clock()
        dice = random.Random(7)  # noqa: S311 - only for tests
        self.draws: Callable[[], int] = lambda: dice.randrange(10_000)
        # Addresses by host name; the system resolves all other names.
        self.names: dict[str, Sequence[str]] = {"receiver.test": ["9.9.9.9"]}
        self.conversion = PlayedConversion()
        is_member = lease_s is not None
        if self.settings.database_url is None and not (data_dir / SQLITE_FILE).exists():
            new_sqlite(data_dir / SQLITE_FILE)
        self.database = Database(
            url_of(self.settings.database_url, data_dir),
            is_shared=is_member,
            listen_url=self.settings.listen_url,
            connections=self.settings.database_connections,
        )
        self.role = alone()
        if lease_s is not None:
            self.role = member(self.database, data_dir.name, lease_s)
        self.leadership = self.role.leadership
        chain = Chain(b"a" * 32)
        self.keys = Keys(self.database, b"pepper", self.clock, chain)
        sessions = ConsoleSessions(
            self.database, self.keys, b"console", (chain, self.clock), session_rules(self.settings)
        )
        self.parts = Parts(
            settings=self.settings,
            public_url="http://service.test",
            database=self.database,
            blobs=blobs_of(self.settings),
            catalogue=self._catalogue if real is None else real.catalogue,
            instances=InstanceCatalogue(self.settings.instance_catalogue),
            recorder=Recorder(),
            replicas=ReplicaGroups(process_starter(workers), data_dir / "logs"),
            cursors=Cursors(b"secret"),
            receivers=Receivers(address_rules(self.settings, OWN_PORT), self._resolve),
            vault=Vault(b"v" * 32),
            keyring=Keyring(b"k" * 32),
            audit=chain,
            audit_heads=Heads(data_dir / HEADS_FILE, b"h" * 32),
            sessions=sessions,
            capabilities=capabilities_of(self.settings, isolates=isolates),
            convert=self.conversion if real is None else real.convert,
            clock=self.clock,
            notifier=self.role.notifier,
            member_number=self.role.number,
            timing=timing or ServiceTiming(),
            tracing=tracing_of(self.settings),
            draw=self._draw,
        )
        # Whether a batch of a tenant may send one more request.
        self.spare: Callable[[str], bool] = lambda _: True
        self._background = BackgroundParts(
            runtime=workers,
            work=data_dir / "work",
            owner="test",
            clock_watch=ClockWatch(self.clock, self.clock.elapsed),
            gpus=GpuLeases(),
            training_agents=training_agents,
        )
        self.supervisor = self.new_supervisor()
        limits = RateLimits(
            self.settings.control_requests_per_minute,
            self.settings.generate_requests_per_minute,
            self.clock,
        )
        self.limit(limits)
        self.log = Lines()
        self.headers = {name: self.key_headers(name) for name in ("alice", "bob")}
        self._addresses = iter(range(1, 1 << 20))
        self._server: HttpServer | None = None
        self.url = "http://service.test"

    def new_supervisor(self, owner: str = "test") -> Supervisor:
        """A supervisor that knows nothing of the one before, as after a restart. `owner`: its name in lease rows."""
        background = replace(self._background, owner=owner)
        return supervisor_of(self.parts, background, self._take_spare, self.leadership)

    @property
    def _catalogue(self) -> Catalogue:
        file = self.settings.model_catalogue
        return Catalogue(file) if file else CATALOGUE

    def limit(self, rates: RateLimits | None = None, **places: Any) -> None:
        """Build the app again, with these rate limits (none by default) and other fields of its `Boundary`."""
        none = RateLimits(0, 0, self.clock)
        self.app = build_app(
            (*SERVED.values(), *OPENAI_SERVED.values()),
            Boundary(self.parts, self.keys, rates or none, **places),
            [console(), OPENAI],
        )

    def _draw(self) -> int:
        return self.draws()

    def _take_spare(self, client: str) -> bool:
        return self.spare(client)

    def _resolve(self, host: str, port: int) -> Sequence[str]:
        return self.names.get(host) or resolve(host, port)

    def start_deliveries(self, timing: DeliveryTiming | None = None) -> None:
        """Start to send webhooks, as `tuneship serve` does."""
        parts, sender = self.parts, Sender(self.parts.receivers)
        deliverer = Deliverer(
            parts.database, parts.vault, sender, self.clock, random.random, timing
        )
        asyncio.run_coroutine_threadsafe(deliverer.run(), self.loop)

    def key_headers(
        self,
        client: str,
        scopes: frozenset[str] | None = None,
        lifetime: timedelta | None = None,
    ) -> dict[str, str]:
        end = None if lifetime is None else self.clock() + lifetime
        key = self.keys.issue(client, SCOPES if scopes is None else scopes, end)
        return {"Authorization": f"Bearer {key}", "X-Client-ID": client}

    def __enter__(self) -> "Service":
        self.loop = asyncio.new_event_loop()
        self._use_new_threads()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.loop_thread = self._thread.ident
        self.go_on()
        logging.getLogger("tuneship").addHandler(self.log)
        logging.getLogger("tuneship").setLevel(logging.INFO)
        return self

    def listen(
        self,
        together: int = 1000,
        budgets: Mapping[str, int] | None = None,
        timing: ServerTiming | None = None,
    ) -> None:
        """Start the HTTP server as `tuneship serve` does; from now on calls go through sockets.

        `together`: how many connections it keeps open. `budgets`: how many log
        messages are allowed by logger; unlimited by default, so that tests find every message.
        """
        with listener_on("127.0.0.1", 0) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            config = server_config(self.app, self.settings)
            proxies = self.settings.trusted_proxies
            timing = timing or ServerTiming(connection=PATIENT)
            self._server = HttpServer(config, together, proxies, budgets or {}, timing)
            sockets = [listener.dup()]
        self._serving = asyncio.run_coroutine_threadsafe(self._server.serve(sockets), self.loop)
        self.until(lambda: self._server is not None and self._server.started)

    def __exit__(self, *_: object) -> None:
        self.engines.may_answer.set()
        if self._server is not None:
            self._server.should_exit = True
            self._serving.result(120)
        try:
            self.run(self._close())
        except TimeoutError:
            raise AssertionError(f"the service does not end: {self._what_is_left()}") from None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self.database.close()
        if self.parts.tracing is not None:
            self.parts.tracing.close()
        logging.getLogger("tuneship").removeHandler(self.log)

    def _what_is_left(self) -> str:
        """Describe where every task and thread waits, and let pytest end although some of them are stuck."""
        pool = self._threads._threads
        for thread in pool:
            futures_threads._threads_queues.pop(thread, None)
        tasks = [where_waits(task) for task in asyncio.all_tasks(self.loop)]
        threads = [f"{one.name}: {where_is(one)}" for one in threading.enumerate()]
        return "\n".join(["", *tasks, *threads])

    def _use_new_threads(self) -> None:
        self._threads = ThreadPoolExecutor()
        self.loop.set_default_executor(self._threads)

    async def _finish_threads(self) -> None:
        """Wait for the threads of ended tasks, because cancelling a task does not wait for its thread."""
        before = self._threads
        self._use_new_threads()
        await asyncio.to_thread(before.shutdown)
        await asyncio.to_thread(until, lambda: self.parts.threads.is_idle)

    def go_on(self) -> None:
        """Start the supervisor; called at the start, and again after a `rest`."""
        self.run(self._supervise())

    async def _supervise(self) -> None:
        self._supervision = asyncio.create_task(self.supervisor.run())
        self._role_tasks = [asyncio.create_task(task.run()) for task in self.role.tasks]

    def rest(self) -> None:
        """Stop the supervisor and wait for its threads, so that from now on only calls change anything."""
        self.run(self._rest())

    async def _rest(self) -> None:
        background = [self._supervision, *self._role_tasks]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        for threads in self.supervisor.threads:
            await threads.finish(120)
        await self._finish_threads()

    def vanish(self) -> None:
        """End what shows the other members of a cluster that this one is there; it goes on without knowing."""
        self.run(self._vanish())

    async def _vanish(self) -> None:
        for task in self._role_tasks:
            task.cancel()
        await asyncio.gather(*self._role_tasks, return_exceptions=True)

    def halt(self) -> None:
        """Stop all background work, so that another service may take over the folder; calls still work."""
        self.run(self._halt())

    async def _halt(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            # Tasks of an anyio group end with their group. If one were cancelled before its first step, the coroutine
            # that it wraps would never be awaited.
            if not getattr(task.get_coro(), "__qualname__", "").startswith("TaskHandle."):
                task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for threads in self.supervisor.threads:
            await threads.finish(120)
        await self._finish_threads()
        await self.parts.replicas.close()

    async def _close(self) -> None:
        await self._halt()
        await asyncio.get_running_loop().shutdown_default_executor()

    def come_over_tls(self, days: int | None = 90) -> None:
        """From now on send calls over TLS, and give Alice a key that is valid for so many days (None: for ever)."""
        self.url = "https://service.test"
        lifetime = None if days is None else timedelta(days=days)
        self.headers["alice"] = self.key_headers("alice", lifetime=lifetime)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def transport(self) -> httpx.AsyncBaseTransport:
        """Make a transport with its own client address, so that failed authentications do not add up across tests."""
        number = next(self._addresses)
        if self._server is not None:
            return httpx.AsyncHTTPTransport(
                verify=False, local_address=f"127.1.{number >> 8}.{number & 255}"
            )
        return httpx.ASGITransport(self.app, client=(f"10.0.{number >> 8}.{number & 255}", 1))

    async def ask(
        self, method: str, path: str, client: str | None = "alice", **options: Any
    ) -> httpx.Response:
        own, more = (httpx.Headers(self.headers.get(client or "")), options.pop("headers", None))
        headers = [*own.raw, *httpx.Headers(more).raw]
        try:
            return await self._ask(self.transport(), method, path, headers=headers, **options)
        except (httpx.LocalProtocolError, h11.LocalProtocolError):
            # No client library sends such headers, but the service must refuse them: pass them in directly.
            below = httpx.ASGITransport(self.app, client=("10.1.0.1", 1))
            return await self._ask(below, method, path, headers=headers, **options)

    async def _ask(
        self, transport: httpx.AsyncBaseTransport, method: str, path: str, **options: Any
    ) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=transport, base_url=self.url, trust_env=False, timeout=120
        ) as http:
            return await http.request(method, path, **options)

    def call(
        self, method: str, path: str, client: str | None = "alice", **options: Any
    ) -> httpx.Response:
        return self.run(self.ask(method, path, client, **options))

    def client(self, tenant: str = "alice") -> AsyncClient:
        key = self.headers[tenant]["Authorization"].removeprefix("Bearer ")
        settings = ClientSettings(url=self.url, api_key=SecretStr(key), client_id=tenant)
        return AsyncClient(settings, transport=self.transport())

    # Objects that many tests need first.

    def dataset(self, client: str = "alice", content: bytes | None = None, **form: Any) -> str:
        form = {"name": "data", "format": "instruction"} | form
        files = {"file": ("x.jsonl", content or jsonl(*LINES), "application/jsonl")}
        answer = self.call("POST", "/v1/datasets", client, data=form, files=files)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def validate(self, content: bytes, **form: str) -> dict[str, Any]:
        answer = self.call(
            "POST",
            "/v1/datasets/validate",
            data={"format": "instruction"} | form,
            files={"file": ("x", content)},
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def job(self, client: str = "alice", **fields: Any) -> str:
        body = {"base_model": "tuneship-tiny", "model_name": "m", **fields}
        body.setdefault("dataset_id", self.dataset(client))
        answer = self.call("POST", "/v1/fine-tuning/jobs", client, json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def trainer(self, number: int = 0) -> Any:
        self.until(lambda: len(self.engines.trainers) > number)
        return self.engines.trainers[number]

    def trainer_of(self, job_id: str) -> Any:
        """Wait for the trainer of a job's newest attempt; trainers of other jobs are ignored."""
        found: list[Any] = []

        def has_started() -> bool:
            found[:] = [one for one in self.engines.trainers if job_id in str(one.folder)]
            return bool(found)

        self.until(has_started)
        return found[-1]

    def job_status(self, job_id: str, client: str = "alice") -> str:
        return self.call("GET", f"/v1/fine-tuning/jobs/{job_id}", client).json()["status"]

    def model(self, client: str = "alice") -> str:
        """Make a fine-tuned model by a played training, and return its id."""
        job_id = self.job(client)
        trainer = self.trainer_of(job_id)
        trainer.start_of(2)
        trainer.complete()
        self.until(lambda: self.job_status(job_id, client) == "completed")
        return self.call("GET", f"/v1/fine-tuning/jobs/{job_id}", client).json()["fine_tuned_model"]

    def deployment(self, name: str, client: str = "alice", **fields: Any) -> str:
        body = {"model_name": "tuneship-tiny", "deployment_name": name, **fields}
        answer = self.call("POST", "/v1/deployments", client, json=body)
        assert answer.status_code == 201, answer.text
        made = answer.json()["id"]
        self.until(lambda: self.deployment_status(made, client) == "running")
        return made

    def deployment_status(self, deployment_id: str, client: str = "alice") -> str:
        return self.call("GET", f"/v1/deployments/{deployment_id}", client).json()["status"]

    def canary(
        self, name: str, shares: dict[str, int], client: str = "alice", **fields: Any
    ) -> str:
        answer = self.call(
            "POST", "/v1/canary-endpoints", client, json=split(shares, name=name, **fields)
        )
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def endpoint(self, name: str, deployment_id: str, client: str = "alice") -> str:
        body = {"name": name, "deployment_id": deployment_id}
        answer = self.call("POST", "/v1/endpoints", client, json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def until(self, holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        until(holds, patience_s)


def split(shares: dict[str, int], **fields: Any) -> dict[str, Any]:
    members = [{"id": one, "traffic_percentage": share} for one, share in shares.items()]
    return {"deployments": members, **fields}
