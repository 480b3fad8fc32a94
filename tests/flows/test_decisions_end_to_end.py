"""Faults that no error tells, through the whole chain: real requests over sockets, real metrics, the real flow.

Only the model is played, and the clock moves a bucket of a minute at each look (`tests/faults/stage.py`).
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.shift_traffic import shift_traffic
from tests.faults.stage import Stage
from tests.flows.conftest import prefect_api, records
from tests.service.in_process import CATALOGUE

__all__ = ["prefect_api", "records"]

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

PATIENCE_S = 0.3
"""Of a caller; a good answer takes milliseconds."""
AT_ONCE = 20
TOKENIZER: Any = CATALOGUE.default.tokenizer


class Callers(Stage):
    """Each bucket brings prompts of many lengths, sent through the endpoint by callers who do not wait for ever."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, allow_fault_injection=True)
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
        timeout = httpx.Timeout(60, read=PATIENCE_S)
        async with httpx.AsyncClient(
            base_url=self.service.url,
            headers=self.service.headers["alice"],
            limits=limits,
            timeout=timeout,
            trust_env=False,
        ) as http:
            await asyncio.gather(*(self._ask(http, number) for number in range(count)))

    async def _ask(self, http: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": "word " * (1 + number % 40), "stream": bool(number % 2)}
        with suppress(httpx.ReadTimeout):  # the caller has hung up
            await http.post(f"/v1/endpoints/{self.endpoint}/generate", json=body)


@pytest.fixture
def callers(prefect_api: None, records: Path, tmp_path: Path) -> Iterator[Callers]:
    with Callers(tmp_path) as made:
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
    callers.meet(**faults)
    # Times on a busy machine are not what is tried here.
    plan = callers.plan(steps=[50, 100], latency_gates=None, max_looks_per_step=5)

    result = shift_traffic(plan)

    assert (result.outcome, result.reason) == ("rolled_back", reason)
    assert callers.seen == [0, 50]
    assert callers.weight == 0
