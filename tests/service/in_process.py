"""The whole service in one thread of the test's process, called over ASGI; only its workers are played."""

import asyncio
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from tests.service.engines import PlayedEngines
from tuneship.client import AsyncClient
from tuneship.metrics.recorder import Recorder
from tuneship.runtime.replicas import ReplicaPool
from tuneship.service.access import Keys, RateLimits, every_scope
from tuneship.service.catalogue import Catalogue
from tuneship.service.context import Parts
from tuneship.service.cursors import Cursors
from tuneship.service.http import Border, build_app
from tuneship.service.supervisor import Supervisor
from tuneship.settings import ClientSettings, ServiceSettings
from tuneship.store.blobs import Blobs
from tuneship.store.database import Database, sqlite_url

CATALOGUE = Catalogue()
ANSWER = "Diseases of the skin"
LINES = [{"instruction": f"case {number}", "response": "chapter"} for number in range(4)]
FAST = {
    "control_requests_per_minute": 10**6,
    "generate_requests_per_minute": 10**6,
    "concurrent_jobs": 10,
}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Clock:
    """Real time plus what the test added."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead


class Lines(logging.Handler):
    """Every log line as text."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


class Service:
    """Two tenants, `alice` and `bob`, and a data folder."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        chosen: dict[str, Any] = FAST | settings
        self.settings = ServiceSettings(data_dir=data_dir, **chosen)
        for name in ("work", "logs", "blobs", "scratch"):
            (data_dir / name).mkdir(parents=True, exist_ok=True)
        tokenizer: Any = CATALOGUE.default.tokenizer
        self.engines = PlayedEngines(tokenizer.encode(ANSWER, add_special_tokens=False).ids)
        self.clock = Clock()
        dice = random.Random(7)  # noqa: S311 - a draw of a test
        self.draws: Callable[[], int] = lambda: dice.randrange(10_000)
        self.database = Database(sqlite_url(data_dir / "tuneship.sqlite"))
        self.parts = Parts(
            settings=self.settings,
            public_url="http://service.test",
            database=self.database,
            blobs=Blobs(str(data_dir / "blobs"), data_dir / "scratch"),
            catalogue=CATALOGUE,
            recorder=Recorder(),
            replicas=ReplicaPool(self.engines, data_dir / "logs"),
            cursors=Cursors(b"secret"),
            clock=self.clock,
            draw=self._draw,
        )
        self.keys = Keys(self.database, b"pepper", self.clock)
        self.supervisor = Supervisor(self.parts, self.engines, data_dir / "work", "test")
        limits = RateLimits(
            self.settings.control_requests_per_minute, self.settings.generate_requests_per_minute
        )
        self.app = build_app(Border(self.parts, self.keys, limits, self.supervisor.wake))
        self.log = Lines()
        self.headers = {name: self.key_headers(name) for name in ("alice", "bob")}
        self._addresses = iter(range(1, 1 << 20))

    def _draw(self) -> int:
        return self.draws()

    def key_headers(self, client: str, scopes: frozenset[str] | None = None) -> dict[str, str]:
        key = self.keys.issue(client, every_scope() if scopes is None else scopes, None)
        return {"Authorization": f"Bearer {key}", "X-Client-ID": client}

    def __enter__(self) -> "Service":
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._running = asyncio.run_coroutine_threadsafe(self.supervisor.run(), self.loop)
        logging.getLogger("tuneship").addHandler(self.log)
        logging.getLogger("tuneship").setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self.engines.may_answer.set()
        self.run(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self.database.close()
        logging.getLogger("tuneship").removeHandler(self.log)

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.parts.replicas.close()
        await asyncio.get_running_loop().shutdown_default_executor()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def transport(self) -> httpx.ASGITransport:
        """From an address of its own, so that failed authentications do not add up over tests."""
        number = next(self._addresses)
        return httpx.ASGITransport(self.app, client=(f"10.0.{number >> 8}.{number & 255}", 1))

    async def ask(
        self, method: str, path: str, client: str | None = "alice", **options: Any
    ) -> httpx.Response:
        own, more = (httpx.Headers(self.headers.get(client or "")), options.pop("headers", None))
        headers = [*own.raw, *httpx.Headers(more).raw]
        async with httpx.AsyncClient(
            transport=self.transport(), base_url="http://service.test", trust_env=False
        ) as http:
            return await http.request(method, path, headers=headers, **options)

    def call(
        self, method: str, path: str, client: str | None = "alice", **options: Any
    ) -> httpx.Response:
        return self.run(self.ask(method, path, client, **options))

    def client(self, tenant: str = "alice") -> AsyncClient:
        key = self.headers[tenant]["Authorization"].removeprefix("Bearer ")
        settings = ClientSettings(
            url="http://service.test", api_key=SecretStr(key), client_id=tenant
        )
        return AsyncClient(settings, transport=self.transport())

    # What many tests need first.

    def dataset(self, client: str = "alice", content: bytes | None = None, **form: Any) -> str:
        form = {"name": "data", "format": "instruction"} | form
        files = {"file": ("x.jsonl", content or jsonl(*LINES), "application/jsonl")}
        answer = self.call("POST", "/v1/datasets", client, data=form, files=files)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def job(self, client: str = "alice", **fields: Any) -> str:
        body = {"base_model": "tuneship-tiny", "model_name": "m", **fields}
        body.setdefault("dataset_id", self.dataset(client))
        answer = self.call("POST", "/v1/fine-tuning/jobs", client, json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def trainer(self, number: int = 0) -> Any:
        self.until(lambda: len(self.engines.trainers) > number)
        return self.engines.trainers[number]

    def job_status(self, job_id: str, client: str = "alice") -> str:
        return self.call("GET", f"/v1/fine-tuning/jobs/{job_id}", client).json()["status"]

    def model(self, client: str = "alice") -> str:
        """A fine-tuned model, out of a played training."""
        job_id, number = self.job(client), len(self.engines.trainers)
        self.trainer(number).start_of(2)
        self.trainer(number).complete()
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

    def until(self, holds: Callable[[], bool], patience_s: float = 20.0) -> None:
        end = time.monotonic() + patience_s
        while not holds():
            assert time.monotonic() < end, "it never became true"
            time.sleep(0.02)


def split(shares: dict[str, int], **fields: Any) -> dict[str, Any]:
    members = [{"id": one, "traffic_percentage": share} for one, share in shares.items()]
    return {"deployments": members, **fields}
