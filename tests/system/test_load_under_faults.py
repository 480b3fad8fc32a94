"""32 clients work while a replica is killed, the database is locked and the service is killed; nothing gets lost.

Each fault ends when a generation succeeds again. Clients may notice only the kill of the service: any other 5xx or
broken connection is an error. The test prints its figures.
"""

import asyncio
import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from scipy.stats import binomtest

from tests.support.service.in_process import LINES, jsonl
from tests.support.service.processes import Serve, running_deployment
from tests.support.waiting import until, until_async
from tests.system.test_load import TLS

pytestmark = [pytest.mark.slow, pytest.mark.soak]
CLIENTS = 32
# Seconds between two faults, and seconds for which the database is locked.
QUIET_S, LOCKED_S = 5.0, 3.0
# The only fault that clients may notice: another replica takes over requests, and a locked database is waited for.
NOTICED = "service killed"
# Statuses after which a create is repeated: its first try, or too many uploads, are still running.
AGAIN = (409, 429)
# The canary's share in percent at the end, the number of requests that check it, and the accepted chance of error.
SHARE, REQUESTS, CHANCE = 30, 2000, 1e-6


@dataclass
class History:
    """A record of requests and answers; times are those of this process's monotonic clock."""

    serve: Serve
    deployments: list[str]
    endpoint: str = ""
    # Ids of datasets by the key of their create request.
    made: dict[str, str] = field(default_factory=dict[str, str])
    # Splits by version of the endpoint, as the answers reported them.
    splits: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    # Contradictions found in answers.
    torn: list[str] = field(default_factory=list[str])
    # Failed requests: start, end and description of each.
    failures: list[tuple[float, float, str]] = field(default_factory=list[tuple[float, float, str]])
    faults: list[tuple[float, float, str]] = field(default_factory=list[tuple[float, float, str]])
    answers: Counter[str] = field(default_factory=Counter[str])

    def record_split(self, reported: dict[str, Any]) -> None:
        """Record a split, as torn if it does not sum to 100 or differs from another of the same version."""
        shares = {one["id"]: one["traffic_percentage"] for one in reported["deployments"]}
        known = self.splits.setdefault(reported["version"], shares)
        if known != shares or sum(shares.values()) != 100 or set(shares) != set(self.deployments):
            self.torn.append(f"version {reported['version']}: {shares}, before {known}")

    @property
    def undeclared(self) -> list[str]:
        """Failures that do not overlap with the one fault that callers may notice."""
        (killed, back) = next(fault[:2] for fault in self.faults if fault[2] == NOTICED)
        return [
            what for begun, ended, what in self.failures if not (begun <= back and killed <= ended)
        ]


class Caller:
    """One client that uses the service's current address for every request."""

    def __init__(self, history: History, seed: int) -> None:
        self.history, self.name = history, seed
        self.dice = random.Random(seed)  # noqa: S311 - a load, not a secret
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> "Caller":
        self._http = httpx.AsyncClient(
            headers=headers_of(self.history.serve), timeout=300, trust_env=False, verify=TLS
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._http is not None
        await self._http.aclose()

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """Send a request; return None if there was no answer or a 5xx."""
        assert self._http is not None
        begun, url = time.monotonic(), self.history.serve.url
        try:
            answer = await self._http.request(method, f"{url}{path}", **options)
        except httpx.TransportError as error:
            what = type(error).__name__
        else:
            what = str(answer.status_code)
            self.history.answers[f"{method} {path.split('/')[2]} {what}"] += 1
            if answer.status_code < 500:
                return answer
            what += f" {answer.text}"
        self.history.failures.append((begun, time.monotonic(), f"{method} {path}: {what}"))
        await asyncio.sleep(0.1)
        return None

    async def step(self, number: int) -> None:
        kind = self.dice.randrange(10)
        if kind < 5:
            await self.generate()
        elif kind < 7:
            await self._shift()
        elif kind < 9:
            await self._upload(f"{self.name}-{number}")
        else:
            await self._walk()

    async def generate(self) -> str | None:
        """Generate once and return the deployment that answered, or None on failure."""
        body = {"prompt": "a", "max_tokens": 1}
        answer = await self.ask(
            "POST", f"/v1/endpoints/{self.history.endpoint}/generate", json=body
        )
        if answer is None:
            return None
        assert answer.status_code == 200, answer.text
        return answer.json()["deployment_id"]

    async def _shift(self) -> None:
        path, share = f"/v1/canary-endpoints/{self.history.endpoint}", self.dice.randrange(101)
        body = split_of(self.history.deployments, share)
        for method, options in (("PATCH", {"json": body}), ("GET", {})):
            answer = await self.ask(method, path, **options)
            if answer is not None:
                assert answer.status_code == 200, answer.text
                self.history.record_split(answer.json())

    async def _upload(self, key: str) -> None:
        """Repeat the same create until it is answered."""
        answer = None
        while answer is None or answer.status_code in AGAIN:
            await asyncio.sleep(0.02)
            files = {"file": ("x", jsonl(*LINES), "application/jsonl")}
            form = {"name": key, "format": "instruction"}
            named = {"Idempotency-Key": key}
            answer = await self.ask("POST", "/v1/datasets", data=form, files=files, headers=named)
        assert answer.status_code == 201, answer.text
        self.history.made[key] = answer.json()["id"]

    async def _walk(self) -> None:
        """Check that a walk over the list meets every id acknowledged before it began, while others are added."""
        known, met, offset = set(self.history.made.values()), list[str](), 0
        while offset is not None:
            query = {"limit": 100, "offset": offset}
            answer = await self.ask("GET", "/v1/datasets", params=query)
            if answer is None:
                return
            page = answer.json()
            met += [one["id"] for one in page["datasets"]]
            offset = page["pagination"]["next_offset"]
        if not known <= set(met):
            self.history.torn.append(f"a walk missed {len(known - set(met))} of {len(known)}")


def headers_of(serve: Serve) -> dict[str, str]:
    credentials = json.loads((serve.data_dir / "credentials.json").read_text())
    key, client = credentials["api_key"], credentials["client_id"]
    return {"Authorization": f"Bearer {key}", "X-Client-ID": client}


def caller_of(serve: Serve) -> httpx.Client:
    headers = headers_of(serve)
    return httpx.Client(
        base_url=serve.url, headers=headers, timeout=300, trust_env=False, verify=TLS
    )


def split_of(deployments: list[str], share: int) -> dict[str, Any]:
    """Return a split that gives the second deployment `share` percent."""
    pairs = zip(deployments, (100 - share, share), strict=True)
    return {"deployments": [{"id": one, "traffic_percentage": part} for one, part in pairs]}


def kill_replica(serve: Serve) -> None:
    os.kill(serve.workers("tuneship.serving")[0], signal.SIGKILL)


def lock_database(serve: Serve) -> None:
    """Lock the database, as a backup or a writer that hangs would."""
    file = serve.data_dir / "tuneship.sqlite"
    database = sqlite3.connect(file, timeout=300, isolation_level=None)  # waits for other writers
    try:
        database.execute("begin immediate")
        time.sleep(LOCKED_S)
        database.execute("rollback")
    finally:
        database.close()


def restart(serve: Serve) -> None:
    serve.process.kill()
    serve.process.wait()
    assert serve.process.stdout is not None
    serve.process.stdout.close()
    serve.start()


FAULTS: dict[str, Callable[[Serve], None]] = {
    "replica killed": kill_replica,
    "database locked": lock_database,
    NOTICED: restart,
}


async def break_things(history: History) -> None:
    """Cause one fault after the other and wait each time until a generation succeeds."""
    async with Caller(history, CLIENTS) as probe:
        for name, fault in FAULTS.items():
            await asyncio.sleep(QUIET_S)
            begun = time.monotonic()
            await asyncio.to_thread(fault, history.serve)
            while await probe.generate() is None:
                assert time.monotonic() < begun + 300, f"{name}: it never came back"
            history.faults.append((begun, time.monotonic(), name))
        await asyncio.sleep(QUIET_S)
        await until_async(lambda: len(history.splits) > CLIENTS)


async def load(history: History) -> None:
    breaking = asyncio.create_task(break_things(history))

    async def client(seed: int) -> None:
        async with Caller(history, seed) as caller:
            number = 0
            while not breaking.done():
                await caller.step(number)
                number += 1

    await asyncio.gather(*(client(seed) for seed in range(CLIENTS)))
    await breaking


async def answered_by(history: History) -> Counter[str | None]:
    """Count which deployment answers how many of `REQUESTS` while the split does not change."""

    async def client(seed: int) -> list[str | None]:
        async with Caller(history, seed) as caller:
            return [await caller.generate() for _ in range(REQUESTS // CLIENTS + 1)]

    rounds = await asyncio.gather(*(client(seed) for seed in range(CLIENTS)))
    return Counter(who for one in rounds for who in one)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    """Run the load with its faults once and return its record."""
    data = tmp_path_factory.mktemp("faults") / "data"
    limits = {"maximum_datasets": "100000", "generate_requests_per_minute": "0"}
    serve = Serve(data, preload=True, **limits)
    try:
        client = serve.client()
        made = History(serve, [running_deployment(client, one, "tuneship-tiny") for one in "ab"])
        with caller_of(serve) as http:
            body = {"name": "shop", **split_of(made.deployments, SHARE)}
            reported = http.post("/v1/canary-endpoints", json=body).json()
        made.endpoint = reported["id"]
        made.record_split(reported)
        asyncio.run(load(made))
        yield made
    finally:
        serve.stop()


@pytest.fixture
def http(history: History) -> Iterator[httpx.Client]:
    with caller_of(history.serve) as client:
        yield client


def test_every_fault_happened_and_nothing_failed_without_one(history: History) -> None:
    took = {name: round(end - start, 2) for start, end, name in history.faults}
    print(took, dict(history.answers), len(history.failures), "failed")  # noqa: T201 - figures
    assert set(took) == set(FAULTS)
    assert history.failures, "the kill of the service was noticed"
    assert history.undeclared == []
    assert "Traceback" not in history.serve.log.read_text()


def test_every_acknowledged_write_is_there_once(history: History, http: httpx.Client) -> None:
    listed: dict[str, str] = {}
    offset: int | None = 0
    while offset is not None:
        page = http.get("/v1/datasets", params={"limit": 100, "offset": offset}).json()
        for one in page["datasets"]:
            assert listed.setdefault(one["name"], one["id"]) == one["id"], "a key made two"
        offset = page["pagination"]["next_offset"]
    assert history.made
    assert listed == history.made


def test_a_split_was_whole_in_every_answer_and_no_walk_missed_an_id(history: History) -> None:
    assert len(history.splits) > CLIENTS
    assert history.torn == []


def test_the_share_that_is_observed_is_the_share_that_was_set_and_every_request_is_counted(
    history: History, http: httpx.Client
) -> None:
    body = {"name": "quiet", **split_of(history.deployments, SHARE)}
    endpoint = http.post("/v1/canary-endpoints", json=body).json()["id"]
    answered = asyncio.run(answered_by(replace(history, endpoint=endpoint)))
    assert set(answered) == set(history.deployments)
    test = binomtest(answered[history.deployments[1]], answered.total(), SHARE / 100)
    assert test.pvalue > CHANCE, answered

    def counted() -> dict[str, int]:
        query = {"endpoint_id": endpoint, "interval": "1m"}
        found: dict[str, int] = {}
        for one in history.deployments:
            reported = http.get(f"/v1/deployments/{one}/metrics", params=query).json()["summary"]
            found[one] = (reported["error_rate"] or {}).get("request_count", 0)
        return found

    until(lambda: sum(counted().values()) >= answered.total())
    assert counted() == answered
