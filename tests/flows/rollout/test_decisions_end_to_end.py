"""Rollouts with faults that cause no errors, and a busy morning: the real service over sockets and the real flow.

The model is played; in the busy morning the requests are played too. Otherwise they come from the shipped traffic
driver or from callers who give up sooner. The clock moves by a bucket of one minute at each look
(`tests/system/faults/stage.py`).
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from flows.shift_traffic import shift_traffic
from tests.support.fakes.proxy import Exchange, passed
from tests.support.service.in_process import CATALOGUE
from tests.system.faults.stage import BEFORE, Stage
from tuneship.gates.plan import CanaryPlan
from tuneship.service.context.request_slots import InFlightLimits, RequestSlots
from tuneship.service.generation import accounting
from tuneship.service.generation import handlers as generation
from tuneship.service.telemetry import in_flight

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.long]

AT_ONCE = 20
TIMEOUT_S = 3600.0
TOKENIZER: Any = CATALOGUE.default.tokenizer


class Callers(Stage):
    """Sends prompts of many lengths through the endpoint in each bucket, from callers who do not wait forever."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, allow_fault_injection=True, **settings)
        self.patience_s = 60.0
        self.per_bucket = 120
        self.service.engines.answer = TOKENIZER.encode("a word " * 10, add_special_tokens=False).ids

    def meet(self, **faults: str) -> None:
        """Deploy a baseline, and a candidate with these faults."""
        self.baseline = self.service.deployment("base")
        tags = {f"fault.{name}": share for name, share in faults.items()}
        self.candidate = self.service.deployment("new", tags=tags)
        self._open({self.baseline: 100, self.candidate: 0})

    def _serve(self, deployment_id: str, count: int) -> None:
        """Send as many requests as both deployments would get, because the service chooses who answers."""
        asyncio.run(self._send(count))

    async def _send(self, count: int) -> None:
        limits = httpx.Limits(max_connections=AT_ONCE)
        timeout = httpx.Timeout(60, read=self.patience_s)
        async with httpx.AsyncClient(
            base_url=self.service.url,
            headers=self.service.headers["alice"],
            limits=limits,
            timeout=timeout,
            trust_env=False,
        ) as http:
            await asyncio.gather(*(self._ask(http, number) for number in range(count)))

    async def _ask(self, http: httpx.AsyncClient, number: int) -> None:
        with suppress(httpx.ReadTimeout):  # the caller gave up
            await http.post(f"/v1/endpoints/{self.endpoint}/generate", json=body_of(number))


class Driven(Callers):
    """Sends the requests with the shipped traffic driver.

    A bucket takes as many of its requests as it may hold and ends when only hanging ones are left; one minute of the
    test's clock has passed then. No request times out, however long the machine takes for a minute of the test's clock.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, generate_timeout_s=TIMEOUT_S)
        self.service.limit(
            slots=RequestSlots(generations=InFlightLimits(each=10_000, together=10_000))
        )
        self.prompts = folder / "prompts.jsonl"
        lines = (json.dumps({"prompt": body_of(number)["prompt"]}) for number in range(40))
        self.prompts.write_text("\n".join(lines))
        self.room = self.per_bucket
        # Signals that `room` has grown; belongs to the event loop of the proxy.
        self.free = asyncio.Condition()
        # The number of requests that the service has received and not answered.
        self.asking = 0

    def minutes_later(self) -> float:
        return time.perf_counter() + 60.0 * (BEFORE + self.ticks)

    def meet(self, **faults: str) -> None:
        super().meet(**faults)
        self.proxy.play("POST", ".*/generate", [self._pass_when_there_is_room], for_ever=True)

    def plan(self, **changes: Any) -> CanaryPlan:
        driver = {
            "prompts": str(self.prompts),
            "requests_per_second": 200,
            "max_in_flight": 1000,
            "timeout_seconds": TIMEOUT_S,
        }
        return super().plan(steps=[50, 100], traffic=driver, **changes)

    def _serve(self, deployment_id: str, count: int) -> None:
        if self.ticks < 0:  # only the baseline serves before the driver starts
            super()._serve(deployment_id, count)

    def tick(self) -> None:
        if self.room < self.per_bucket:  # the driver has begun
            self.service.until(self._only_hanging_ones_are_left)
        super().tick()
        self.proxy.run(self._make_room())

    async def _make_room(self) -> None:
        async with self.free:
            self.room = self.per_bucket
            self.free.notify_all()

    async def _pass_when_there_is_room(self, exchange: Exchange) -> None:
        async with self.free:
            await self.free.wait_for(lambda: self.room > 0)
            self.room -= 1
        self.asking += 1
        try:
            await passed(exchange)
        finally:
            self.asking -= 1

    def _only_hanging_ones_are_left(self) -> bool:
        ages = self.service.parts.in_flight.ages(self.candidate)
        is_busy = any(replica.running for replica in self.service.engines.replicas)
        return self.room == 0 and self.asking == sum(map(sum, ages.values())) and not is_busy


class Morning(Stage):
    """Quadruples the users evenly over the first hour, while all answers become 1.7 times as slow."""

    def tick(self) -> None:
        share = min(1.0, (BEFORE + self.ticks) / 60)
        self.per_bucket = int(300 * (1 + 3 * share))
        self.slower = 1 + 0.7 * share
        super().tick()


def body_of(number: int) -> dict[str, Any]:
    return {"prompt": "word " * (1 + number % 40), "stream": bool(number % 2)}


@pytest.fixture
def callers(prefect_api: None, records: Path, tmp_path: Path) -> Iterator[Callers]:
    with Callers(tmp_path) as stage:
        yield stage


@pytest.fixture
def driven(prefect_api: None, records: Path, tmp_path: Path) -> Iterator[Driven]:
    with Driven(tmp_path) as stage:
        yield stage


def test_requests_that_callers_give_up_return_the_traffic(callers: Callers) -> None:
    callers.patience_s = 0.5
    callers.meet(hang="0.5")
    # Latencies on a busy machine are not tested here.
    plan = callers.plan(steps=[50, 100], latency_gates=None, max_looks_per_step=5)

    result = shift_traffic(plan)

    assert (result.outcome, result.reason) == ("rolled_back", "abandoned_requests")
    assert callers.seen == [0, 50]
    assert callers.weight == 0


@pytest.mark.parametrize(
    ("fault", "share", "reason"),
    [
        ("refuse", "0.5", "refused_requests"),
        pytest.param("short", "1", "quality", marks=pytest.mark.soak),
    ],
)
def test_harm_that_raises_no_error_returns_the_traffic_for_its_own_reason(
    driven: Driven, fault: str, share: str, reason: str
) -> None:
    driven.meet(**{fault: share})

    result = shift_traffic(driven.plan(latency_gates=None, max_looks_per_step=8))

    assert (result.outcome, result.reason) == ("rolled_back", reason)
    assert driven.seen == [0, 50]
    assert driven.weight == 0


def test_a_hanging_request_is_slow_before_it_times_out_and_before_anybody_disconnects(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven.meet(hang="0.5")
    clock = SimpleNamespace(perf_counter=driven.minutes_later, monotonic=time.monotonic)
    for module in (generation, accounting, in_flight):
        monkeypatch.setattr(module, "time", clock)

    result = shift_traffic(driven.plan(max_looks_per_step=30))

    assert (result.outcome, result.reason) == ("rolled_back", "latency")
    look = result.decisions[-1]
    assert sum(look["hanging_baseline"]) == 0
    assert sum(look["hanging_candidate"]) > 0
    assert driven.weight == 0


@pytest.mark.parametrize(
    "bake_weight", [95, None], ids=["beside the baseline", "against frozen limits"]
)
def test_a_busy_morning_returns_no_traffic(
    prefect_api: None, records: Path, tmp_path: Path, bake_weight: int | None
) -> None:
    with Morning(tmp_path) as users:
        users.set_up()
        plan = users.plan(
            steps=[5, 25, 50, 100], bake_looks=30, bake_weight=bake_weight, max_looks_per_step=60
        )
        result = shift_traffic(plan)

        # Latency is not compared while the candidate carries four times the baseline's load.
        assert (result.outcome, result.reason) == ("promoted", "none")
        assert users.weight == 100
