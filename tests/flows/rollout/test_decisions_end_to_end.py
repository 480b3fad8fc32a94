"""Faults that no error tells, and a morning that is nobody's fault, through the whole chain: the real service over
sockets, its metrics, the real flow.

The model is played, in the morning the requests, too, and the clock moves a bucket of a minute at each look
(`tests/system/faults/stage.py`).
"""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from flows.shift_traffic import shift_traffic
from tests.flows.conftest import prefect_api, records
from tests.support.in_process import CATALOGUE
from tests.system.faults.stage import BEFORE, Stage
from tuneship.service.common import in_flight as under_way
from tuneship.service.generation import accounting as generation_ends
from tuneship.service.generation import handlers as generation
from tuneship.service.http.boundary import InFlightLimits

__all__ = ["prefect_api", "records"]

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

AT_ONCE = 20
TOKENIZER: Any = CATALOGUE.default.tokenizer


class Callers(Stage):
    """Each bucket brings prompts of many lengths, sent through the endpoint by callers who do not wait for ever."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, allow_fault_injection=True)
        self.patience_s = 60.0
        self.per_bucket = 120
        self.service.engines.answer = TOKENIZER.encode("a word " * 10, add_special_tokens=False).ids

    def meet(self, **faults: str) -> None:
        """A baseline, and a candidate with these faults."""
        self.baseline = self.service.deployment("base")
        tags = {f"fault.{name}": share for name, share in faults.items()}
        self.candidate = self.service.deployment("new", tags=tags)
        self._open({self.baseline: 100, self.candidate: 0})

    def _serve(self, deployment_id: str, count: int) -> None:
        """The service draws who answers, so it is enough to send as many as both would get."""
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
        with suppress(httpx.ReadTimeout):  # the caller has hung up
            await http.post(f"/v1/endpoints/{self.endpoint}/generate", json=body_of(number))


class PatientCallers(Callers):
    """Nobody hangs up. Whoever waits at the end of a bucket has waited for a minute, by the clock of this test."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.service.limit(generations=InFlightLimits(each=10_000, together=10_000))
        self.waiting: list[Future[httpx.Response]] = []

    def minutes_later(self) -> float:
        return time.perf_counter() + 60.0 * (BEFORE + self.ticks)

    async def _send(self, count: int) -> None:
        path = f"/v1/endpoints/{self.endpoint}/generate"
        for first in range(0, count, AT_ONCE):
            for number in range(first, min(first + AT_ONCE, count)):
                asking = self.service.ask("POST", path, json=body_of(number))
                self.waiting.append(asyncio.run_coroutine_threadsafe(asking, self.service.loop))
            self.service.until(self._only_hanging_ones_are_left)

    def _only_hanging_ones_are_left(self) -> bool:
        self.waiting = [one for one in self.waiting if not one.done()]
        hanging = self.service.parts.in_flight.ages_ms(self.candidate)
        is_busy = any(replica.running for replica in self.service.engines.replicas)
        return len(self.waiting) == len(hanging) and not is_busy


class Morning(Stage):
    """Evenly over the first hour users become four times as many, and all answers take 1.7 times as long."""

    def tick(self) -> None:
        share = min(1.0, (BEFORE + self.ticks) / 60)
        self.per_bucket = int(300 * (1 + 3 * share))
        self.slower = 1 + 0.7 * share
        super().tick()


def body_of(number: int) -> dict[str, Any]:
    return {"prompt": "word " * (1 + number % 40), "stream": bool(number % 2)}


@pytest.fixture
def callers(prefect_api: None, records: Path, tmp_path: Path) -> Iterator[Callers]:
    with Callers(tmp_path) as made:
        yield made


@pytest.fixture
def patient_callers(prefect_api: None, records: Path, tmp_path: Path) -> Iterator[PatientCallers]:
    with PatientCallers(tmp_path) as made:
        yield made


FAULTS = {
    "hang": ({"hang": "0.5"}, "abandoned_requests"),
    "refuse": ({"refuse": "0.5"}, "refused_requests"),
    "short": ({"short": "1"}, "quality"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_no_error_tells_returns_the_traffic_for_its_own_reason(
    callers: Callers, fault: str
) -> None:
    faults, reason = FAULTS[fault]
    callers.patience_s = 0.5 if fault == "hang" else callers.patience_s
    callers.meet(**faults)
    # Times on a busy machine are not what is tried here.
    plan = callers.plan(steps=[50, 100], latency_gates=None, max_looks_per_step=5)

    result = shift_traffic(plan)

    assert (result.outcome, result.reason) == ("rolled_back", reason)
    assert callers.seen == [0, 50]
    assert callers.weight == 0


def test_what_hangs_is_slow_before_it_times_out_and_before_anybody_hangs_up(
    patient_callers: PatientCallers, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = patient_callers
    callers.meet(hang="0.5")
    clock = SimpleNamespace(perf_counter=callers.minutes_later)
    for module in (generation, generation_ends, under_way):
        monkeypatch.setattr(module, "time", clock)

    result = shift_traffic(callers.plan(steps=[50, 100], max_looks_per_step=12))

    assert (result.outcome, result.reason) == ("rolled_back", "latency")
    look = result.decisions[-1]
    assert sum(look["hanging_baseline"]) == 0
    assert sum(look["hanging_candidate"]) > 0
    assert callers.weight == 0


@pytest.mark.parametrize(
    ("bake_weight", "outcome", "reason"),
    [(95, "promoted", "none"), (None, "rolled_back", "latency")],
    ids=["beside the baseline", "against frozen limits"],
)
def test_a_busy_morning_returns_no_traffic_where_the_bake_has_a_baseline(
    prefect_api: None,
    records: Path,
    tmp_path: Path,
    bake_weight: int | None,
    outcome: str,
    reason: str,
) -> None:
    with Morning(tmp_path) as users:
        users.set_up()
        plan = users.plan(
            steps=[5, 25, 50, 100], bake_looks=30, bake_weight=bake_weight, max_looks_per_step=60
        )
        result = shift_traffic(plan)

        assert (result.outcome, result.reason) == (outcome, reason)
        assert users.weight == (100 if outcome == "promoted" else 0)
