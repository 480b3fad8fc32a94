"""200 clients work at once for half a minute: nothing acknowledged is lost, and every answer is a declared one.

And for a minute and a half: the service needs no more memory and descriptors at the end than in the middle.
"""

import asyncio
import os
import random
import re
import signal
import ssl
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.service.in_process import LINES, jsonl
from tests.support.service.processes import Serve, running_deployment
from tests.support.waiting import PATIENCE_S, children, is_alive, until
from tuneship.contract.declaring.scopes import SCOPES
from tuneship.security.master_key import derived_secret, read_or_make_secret
from tuneship.service.access.api_keys import Keys
from tuneship.service.background.clock_watch import utc_now
from tuneship.store.database.database import Database, sqlite_url
from tuneship.store.records.audit import Chain

pytestmark = [pytest.mark.slow, pytest.mark.soak]
CLIENTS = 200
# An unused TLS context, because a client without one creates its own, which takes longer than its requests.
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
SECONDS = 30.0
LIST_OF = {
    "/v1/datasets": "datasets",
    "/v1/deployments": "deployments",
    "/v1/canary-endpoints": "canary_endpoints",
    "/v1/fine-tuning/jobs": "jobs",
}


@dataclass
class History:
    """A record of requests and answers; `created` (by list) and `deleted` hold acknowledged ids."""

    deployment_id: str
    created: dict[str, set[str]] = field(default_factory=lambda: {path: set() for path in LIST_OF})
    deleted: set[str] = field(default_factory=set[str])
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    undeclared: list[str] = field(default_factory=list[str])
    number: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    created = Serve(tmp_path_factory.mktemp("load") / "data", preload=True)
    yield created
    created.stop()


class Caller:
    """One client with a connection of its own."""

    def __init__(self, http: httpx.AsyncClient, history: History, routes: list[Any], seed: int):
        self.http, self.history, self.routes = http, history, routes
        self.dice = random.Random(seed)  # noqa: S311 - a load, not a secret
        self.own: list[tuple[str, str]] = []

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        answer = await self.http.request(method, path, **options)
        plain = path.partition("?")[0]
        operation = next(one for one in self.routes if one[0] == method and one[1].fullmatch(plain))
        self.history.answers[f"{method} {operation[2]}", answer.status_code] += 1
        if str(answer.status_code) not in operation[3]:
            self.history.undeclared.append(f"{method} {plain}: {answer.status_code} {answer.text}")
        return answer

    async def create(self, path: str, **options: Any) -> None:
        answer = await self.ask("POST", path, **options)
        if answer.status_code == 201:
            created = answer.json()["id"]
            self.history.created[path].add(created)
            self.own.append((path, created))

    async def step(self) -> None:
        history, name = self.history, f"n{next(self.history.number)}"
        kind = self.dice.randrange(8)
        if kind == 0:
            files = {"file": ("x", jsonl(*LINES), "application/jsonl")}
            form = {"name": name, "format": "instruction"}
            await self.create("/v1/datasets", data=form, files=files)
        elif kind == 1:
            body = {"deployment_name": name, "model_name": "tuneship-tiny"}
            await self.create("/v1/deployments", json=body)
        elif kind == 2:
            share = [{"id": history.deployment_id, "traffic_percentage": 100}]
            await self.create("/v1/canary-endpoints", json={"name": name, "deployments": share})
        elif kind == 3:
            await self._change()
        elif kind == 4:
            body = {"prompt": "a", "max_tokens": 2}
            await self.ask("POST", f"/v1/deployments/{history.deployment_id}/generate", json=body)
        elif kind == 5:
            await self.ask("GET", self.dice.choice([*LIST_OF]) + "?limit=5")
        elif self.own:
            path, created = self.dice.choice(self.own)
            await self.ask("GET", f"{path}/{created}")

    async def _change(self) -> None:
        """Update or delete one of the caller's own resources."""
        if not self.own:
            return
        index = self.dice.randrange(len(self.own))
        path, created = self.own[index]
        if path == "/v1/deployments" and self.dice.random() < 0.5:
            await self.ask("PATCH", f"{path}/{created}", json={"tags": {"k": "v"}})
            return
        answer = await self.ask("DELETE", f"{path}/{created}")
        if answer.status_code == 200:
            self.history.deleted.add(created)
            del self.own[index]


def routes_of(document: dict[str, Any]) -> list[Any]:
    """Return method, path pattern, template and declared statuses of every operation."""
    return [
        (
            method.upper(),
            re.compile(re.sub(r"{\w+}", "[^/]+", template)),
            template,
            set(operation["responses"]),
        )
        for template, methods in document["paths"].items()
        for method, operation in methods.items()
        if isinstance(operation, dict)
    ]


async def load(serve: Serve, history: History) -> None:
    headers = serve.headers
    end = asyncio.get_running_loop().time() + SECONDS
    async with httpx.AsyncClient(
        base_url=serve.url, trust_env=False, verify=TLS, timeout=300
    ) as http:
        routes = routes_of((await http.get("/openapi.json")).json())

    async def client(seed: int) -> None:
        async with httpx.AsyncClient(
            base_url=serve.url, headers=headers, timeout=300, trust_env=False, verify=TLS
        ) as http:
            caller = Caller(http, history, routes, seed)
            while asyncio.get_running_loop().time() < end:
                await caller.step()

    await asyncio.gather(*(client(seed) for seed in range(CLIENTS)))


def listed_ids(serve: Serve, path: str) -> set[str]:
    """Return every id of a list, read page by page."""
    found: set[str] = set()
    offset: int | None = 0
    with httpx.Client(
        base_url=serve.url, headers=serve.headers, timeout=300, trust_env=False, verify=TLS
    ) as http:
        while offset is not None:
            page = http.get(path, params={"limit": 100, "offset": offset}).json()
            found |= {one["id"] for one in page[LIST_OF[path]]}
            offset = page["pagination"]["next_offset"]
    return found


def test_two_hundred_clients_lose_nothing(serve: Serve, tmp_path: Path) -> None:
    history = History(running_deployment(serve.client(), "shared", "tuneship-tiny"))
    asyncio.run(load(serve, history))
    assert not history.undeclared, history.undeclared[:5]
    assert not [one for one in history.answers if one[1] >= 500 and one[1] != 503]
    for path, created in history.created.items():
        assert created or path == "/v1/fine-tuning/jobs", path  # jobs are only listed here
        listed = listed_ids(serve, path)
        assert created - history.deleted <= listed
        # A deployment is listed as `deleting` until its running requests are done.
        until(
            lambda path=path, deleted=created & history.deleted: (
                not deleted & listed_ids(serve, path)
            )
        )
    assert history.deleted
    assert any(name.endswith("/generate") and status == 200 for name, status in history.answers)
    assert sum(history.answers.values()) > CLIENTS
    log = serve.log.read_text()
    assert "Traceback" not in log
    print(dict(history.answers))  # noqa: T201 - prints the figures of the run


SETTLED_S, STEADY_S = 45.0, 45.0
MOST_GROWTH_BYTES = 24 << 20
MOST_MORE_DESCRIPTORS = 20


@dataclass
class Needs:
    """The memory and the descriptors of a process, once a second."""

    resident: list[int] = field(default_factory=list[int])
    descriptors: list[int] = field(default_factory=list[int])

    def measure(self, process: int) -> None:
        place = Path(f"/proc/{process}")
        pages = int((place / "statm").read_text().split()[1])
        self.resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.descriptors.append(len(list((place / "fd").iterdir())))


async def step(http: httpx.AsyncClient, deployment: str, kind: str) -> str:
    """Send one request of a kind, and return the status of its answer."""
    if kind == "upload":
        files = {"file": ("x", jsonl(*LINES * 500), "application/jsonl")}
        form = {"name": "d", "format": "instruction"}
        answer = await http.post("/v1/datasets", data=form, files=files)
        if answer.is_success:
            await http.delete(f"/v1/datasets/{answer.json()['id']}")
    elif kind == "list":
        answer = await http.get("/v1/events?limit=100")
    elif kind == "health":
        # A connection that never needs a key is ended after a minute.
        answer = await http.get("/healthz", headers={"Connection": "close"})
    else:
        body = {"prompt": "Fracture of rib", "max_tokens": 32, "temperature": 2}
        body["stream"] = kind == "stream"
        answer = await http.post(f"/v1/deployments/{deployment}/generate", json=body)
        if kind == "stream" and answer.is_success and "event: done" not in answer.text:
            return "broken off"
    return str(answer.status_code)


def tenants_of(serve: Serve) -> list[tuple[dict[str, str], str]]:
    """The headers of several tenants, none of which may have 200 requests in flight, and a deployment of each."""
    secret = read_or_make_secret(serve.data_dir / "master.key")
    database = Database(sqlite_url(serve.data_dir / "tuneship.sqlite"))
    audit = Chain(derived_secret(secret, "audit"))
    keys = Keys(database, derived_secret(secret, "keys"), utc_now, audit)
    made: list[tuple[dict[str, str], str]] = []
    for name in ("one", "two", "three", "four"):
        key = keys.issue(name, SCOPES, None)
        headers = {"Authorization": f"Bearer {key}", "X-Client-ID": name}
        body = {"model_name": "tuneship-tiny", "deployment_name": name}
        with httpx.Client(base_url=serve.url, headers=headers, trust_env=False, timeout=60) as http:
            created = http.post("/v1/deployments", json=body).json()["id"]
            path = f"/v1/deployments/{created}"
            until(lambda http=http, path=path: http.get(path).json()["status"] == "running")
        made.append((headers, created))
    database.close()
    return made


async def steady_load(serve: Serve, needs: Needs) -> Counter[str]:
    """200 callers generate, half of them as streams; others upload and delete, list, and ask for health."""
    tenants = tenants_of(serve)
    clock = asyncio.get_running_loop().time
    end = clock() + SETTLED_S + STEADY_S
    answers = Counter[str]()

    async def repeat(kind: str, pause_s: float, number: int = 0) -> None:
        headers, deployment = tenants[number // 2 % len(tenants)]
        async with httpx.AsyncClient(
            base_url=serve.url, headers=headers, timeout=300, trust_env=False, verify=TLS
        ) as http:
            while clock() < end:
                try:
                    status = await step(http, deployment, kind)
                except httpx.HTTPError as error:
                    status = type(error).__name__
                answers[f"{kind} {status}"] += 1
                await asyncio.sleep(pause_s)

    async def measure() -> None:
        await asyncio.sleep(SETTLED_S)
        while clock() < end:
            needs.measure(serve.process.pid)
            await asyncio.sleep(1)

    others = [repeat("upload", 1), repeat("list", 0.5), repeat("health", 0.2), measure()]
    callers = [repeat("stream" if number % 2 else "whole", 0, number) for number in range(CLIENTS)]
    await asyncio.gather(*callers, *others)
    return answers


def test_a_steady_load_leaves_nothing_behind(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "data", preload=True, generate_requests_per_minute="0")
    try:
        needs = Needs()
        answers = asyncio.run(steady_load(serve, needs))
        print(answers, needs)  # noqa: T201 - prints the figures of the run
        failures = [one for one in answers if one.split()[1] not in {"200", "201"}]
        assert not failures, (answers, serve.log.read_text()[-2000:])
        kinds = {one.split()[0] for one in answers}
        assert kinds == {"stream", "whole", "upload", "list", "health"}
        third = len(needs.resident) // 3
        for values, most in (
            (needs.resident, MOST_GROWTH_BYTES),
            (needs.descriptors, MOST_MORE_DESCRIPTORS),
        ):
            assert statistics.median(values[-third:]) < statistics.median(values[:third]) + most
        workers = children(serve.process.pid)
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(PATIENCE_S) == 0
        until(lambda: not any(map(is_alive, workers)))
        assert not list((tmp_path / "data" / "scratch").iterdir())
        log = serve.log.read_text()
        assert "Traceback" not in log
        assert "left behind" not in log
    finally:
        serve.stop()
