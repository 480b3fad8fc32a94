"""`tuneship serve` is killed repeatedly at random while clients work; what it acknowledged exists exactly once.

A history records the result of every request: `ok`, `fail` (refused, nothing was done) or `unknown` (until it is sent
again with its key). The test is seeded and prints its figures; `make soak` kills more often. The workers are simulated:
`test_real_processes.py` kills real ones.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from tests.support.faults import invariants
from tests.support.service.forked_serve import NOBODY_WORKS, ForkedServe
from tests.support.service.in_process import LINES, jsonl
from tests.support.service.processes import running_deployment
from tests.support.waiting import until, until_async
from tests.system.test_load import TLS
from tuneship.client import Client
from tuneship.contract.generation import Generate
from tuneship.security.master_key import derived_secret, read_or_make_secret
from tuneship.settings import ClientSettings
from tuneship.store.database import tables
from tuneship.store.database.database import Database, url_of
from tuneship.store.records.audit import Chain

pytestmark = [pytest.mark.both_databases(postgres="soak"), pytest.mark.long]
CLIENTS = 6
# Limit in seconds that holds on a machine under any load; the real figures are printed.
READY_WITHIN_S = 60.0
# Every third life lasts until something was created, because on a slow machine the others might not get so far.
PRODUCTIVE = 3
FORM = {"name": "d", "format": "instruction"}


@dataclass
class Operation:
    """One change under one key; `result` is `unknown` until an answer settles it."""

    method: str
    path: str
    key: str
    options: dict[str, Any]
    result: str = "unknown"
    answer: dict[str, Any] = field(default_factory=dict[str, Any])


class Person:
    """One client that sends one request at a time and repeats it with its key until the result is known."""

    def __init__(self, name: int, serve: ForkedServe, seed: int) -> None:
        self.serve = serve
        self.name = name
        self.dice = random.Random(seed)  # noqa: S311 - a load, not a secret
        self.history: list[Operation] = []
        self.answers: Counter[str] = Counter()

    async def work(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            await self._finish(self._next())
        for one in self.history:
            if one.result == "unknown":
                await self._finish(one)

    def _next(self) -> Operation:
        key = f"{self.name}-{len(self.history)}"
        made = [
            one.answer["id"]
            for one in self.history
            if one.result == "ok" and one.path == "/v1/datasets"
        ]
        if made and self.dice.random() < 0.3:
            body = {"dataset_id": self.dice.choice(made), "base_model": "tuneship-tiny"}
            body |= {"model_name": key, "hyperparameters": {"epochs": 1}}
            return self._invoke("/v1/fine-tuning/jobs", key, json=body)
        if self.dice.random() < 0.4:
            body = {"deployment_name": key, "model_name": "tuneship-tiny"}
            return self._invoke("/v1/deployments", key, json=body)
        files = {"file": ("x", jsonl(*LINES))}
        return self._invoke("/v1/datasets", key, data=FORM, files=files)

    def _invoke(self, path: str, key: str, **options: Any) -> Operation:
        self.history.append(Operation("POST", path, key, options))
        return self.history[-1]

    async def _finish(self, one: Operation) -> None:
        """Repeat the request until an answer settles its result."""
        while one.result == "unknown":
            try:
                answer = await self._ask(one)
            except (httpx.TransportError, OSError, ValueError):
                self.answers["unknown"] += 1
                await asyncio.sleep(0.05)
                continue
            self.answers[str(answer.status_code)] += 1
            if answer.status_code == 201:
                one.result, one.answer = "ok", answer.json()
            elif answer.headers["x-should-retry"] == "false":
                one.result = "fail"
            else:
                await asyncio.sleep(0.05)

    async def _ask(self, one: Operation) -> httpx.Response:
        credentials = json.loads((self.serve.data_dir / "credentials.json").read_text())
        headers = {
            "Authorization": f"Bearer {credentials['api_key']}",
            "X-Client-ID": credentials["client_id"],
            "Idempotency-Key": one.key,
        }
        async with httpx.AsyncClient(
            base_url=self.serve.url, headers=headers, timeout=60, trust_env=False, verify=TLS
        ) as http:
            return await http.request(one.method, one.path, **one.options)


@pytest.mark.slow
def test_a_service_that_starts_again_is_ready_before_what_it_served(
    tmp_path: Path, database_settings: Callable[[], dict[str, Any]]
) -> None:
    """Check that readiness does not wait for models."""
    serve = ForkedServe(tmp_path / "data", database_settings().get("database_url", ""))
    hold = serve.data_dir / NOBODY_WORKS
    ask = Generate(prompt="case", max_tokens=2)
    with client_of(serve) as client:
        made = running_deployment(client, "d", "tuneship-tiny")
        assert client.deployments.generate(made, ask).completion
    serve.kill()
    hold.touch()
    serve.start()
    with client_of(serve) as client:
        assert [one.id for one in client.deployments.list().deployments] == [made]
    serve.kill()
    hold.unlink()
    serve.start()
    with client_of(serve) as client:
        until(lambda: client.deployments.generate(made, ask).completion)
    serve.kill()
    serve.end()


def client_of(serve: ForkedServe) -> Client:
    return Client(ClientSettings.from_credentials(serve.data_dir / "credentials.json"))


@pytest.mark.slow
def test_thirty_random_kills_lose_and_double_nothing(
    tmp_path: Path, database_settings: Callable[[], dict[str, Any]]
) -> None:
    kill_at_random(tmp_path, database_settings().get("database_url", ""), seed=1, kills=30)


@pytest.mark.slow
@pytest.mark.soak
def test_six_hundred_random_kills_lose_and_double_nothing(
    tmp_path: Path, database_settings: Callable[[], dict[str, Any]]
) -> None:
    kill_at_random(tmp_path, database_settings().get("database_url", ""), seed=2, kills=600)


def kill_at_random(folder: Path, database_url: str, seed: int, kills: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - a fault, not a secret
    serve = ForkedServe(folder / "data", database_url)
    people = [Person(name, serve, seed * 1000 + name) for name in range(CLIENTS)]
    asyncio.run(_all(serve, people, dice, kills))
    database = Database(url_of(SecretStr(database_url) if database_url else None, serve.data_dir))
    until(lambda: _is_at_rest(database), 600)
    serve.kill()
    serve.start()  # the start removes what the last process left behind
    _check(database, serve.data_dir, people)
    database.close()
    serve.kill()
    serve.end()
    figures = sum((one.answers for one in people), Counter[str]())
    middle, slowest = sorted(serve.ready_s)[len(serve.ready_s) // 2], max(serve.ready_s)
    print(  # noqa: T201 - prints the figures of the run
        f"seed {seed}: {kills} kills, answers {dict(figures)}, ready again after {middle:.2f} s "
        f"(median), {slowest:.2f} s at most"
    )
    assert figures["201"] > kills // 4
    assert slowest < READY_WITHIN_S
    assert "Traceback" not in serve.log.read_text()


async def _all(serve: ForkedServe, people: list[Person], dice: random.Random, kills: int) -> None:
    async def kill() -> None:
        for life in range(kills):
            if life % PRODUCTIVE == 0:
                await _until_something_is_made(people)
            await asyncio.sleep(dice.uniform(0.0, 0.8))
            await asyncio.to_thread(serve.kill)
            await asyncio.to_thread(serve.start)

    killing = asyncio.create_task(kill())
    await asyncio.gather(*(one.work(killing.done) for one in people))
    await killing


async def _until_something_is_made(people: list[Person]) -> None:
    def made() -> int:
        return sum(one.answers["201"] for one in people)

    before = made()
    await until_async(lambda: made() > before)


def _is_at_rest(database: Database) -> bool:
    with database.read() as connection:
        try:
            invariants.check_at_rest(connection)
        except AssertionError:
            return False
    return True


def _check(database: Database, data_dir: Path, people: list[Person]) -> None:
    """Check that exactly the acknowledged resources exist, each once."""
    history = [one for person in people for one in person.history]
    assert {one.result for one in history} <= {"ok", "fail"}
    made = [one.answer["id"] for one in history if one.result == "ok"]
    assert len(set(made)) == len(made)
    with database.read() as connection:
        there = [
            row["id"]
            for table in (tables.datasets, tables.jobs, tables.deployments)
            for row in invariants.rows_of(connection, table)
        ]
        assert sorted(there) == sorted(made)
        invariants.check_rows(connection)
        invariants.check_settled(connection, data_dir)
        secret = read_or_make_secret(data_dir / "master.key")
        chain = Chain(derived_secret(secret, "audit"))
        invariants.check_audit(connection, chain, Counter(made))
