"""A rollout against the real service behind the proxy, with played traffic: one bucket of a minute for each look.

The service's clock moves a bucket whenever the pipeline asks for the baseline's state, which it does once a look; so a
rollout takes seconds, decides the same on any machine, and an act can be put at a bucket (`at_tick`).
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from pydantic import SecretStr

from tasks.api import connect, disconnect
from tests.support.engines import PlayedTrainer
from tests.support.fakes.proxy import Exchange, Proxy, passed
from tests.support.in_process import Service
from tuneship.client import Client
from tuneship.gates.plan import CanaryPlan
from tuneship.metrics.observations import Observation, RequestOutcome
from tuneship.settings import ClientSettings

BUCKET = timedelta(minutes=1)
PER_BUCKET = 600
ERRORS_IN = 300
"""Of so many requests of a bucket the last one fails, on either deployment."""
LOSSES = (0.74, 0.72, 0.71, 0.70)
"""Of a training that learns; the played perplexity is that of 0.69."""
BEFORE = 3
"""Buckets of the baseline alone, before a rollout."""


class Stage:
    """Two deployments, an endpoint that gives the baseline everything, and users. Enter it to use it."""

    def __init__(self, folder: Path, ahead: timedelta = timedelta(), **settings: Any) -> None:
        """`ahead`: of the runner's clock is the service's. `settings` of the service."""
        self.service = Service(folder / "data", **settings)
        self.service.clock.ahead = ahead
        self.at_tick: dict[int, Callable[[], object]] = {}
        """What happens once so many buckets of the rollout are over."""
        self.per_bucket = PER_BUCKET
        self.slower = 1.0
        """How many times as long every request takes, on either deployment."""
        self.ticks = -BEFORE
        self.seen: list[int] = []
        """The candidate's shares, each once, as buckets met them."""
        self.baseline = self.candidate = self.endpoint = ""
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        """Every task's client goes through the proxy from now on."""
        service = self._opened.enter_context(self.service)
        service.listen()
        port = int(service.url.rpartition(":")[2])
        self.proxy = self._opened.enter_context(Proxy(port))
        self.direct = self._opened.enter_context(Client(self.settings(service.url)))
        connect(self.settings(f"http://127.0.0.1:{self.proxy.port}"))
        self._opened.callback(disconnect)
        self._into_the_middle_of_the_next_bucket()
        return self

    def __exit__(self, *_: object) -> None:
        """Strike it."""
        self._opened.close()

    def settings(self, url: str) -> ClientSettings:
        """Of a client that enters here."""
        key = self.service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        return ClientSettings(url=url, api_key=SecretStr(key), client_id="alice")

    def set_up(self) -> None:
        """The pair and its endpoint."""
        self.baseline = self.service.deployment("base")
        self.candidate = self.service.deployment("new")
        shares = {self.baseline: 100, self.candidate: 0}
        self._open(shares)

    def set_up_alone(self) -> None:
        """The baseline and its endpoint; a release brings the candidate."""
        self.baseline = self.service.deployment("base")
        self._open({self.baseline: 100})

    def _open(self, shares: dict[str, int]) -> None:
        """From now on users are there, and looks move the clock; `proxy.heal()` stops it with everything else."""
        self.endpoint = self.service.canary("shop", shares)
        for _ in range(BEFORE):
            self.tick()
        self.let_looks_tick()

    def let_looks_tick(self) -> None:
        """The rule that moves the clock."""
        path = f"/v1/deployments/{self.baseline}"
        self.proxy.play("GET", path, [self._tick_and_pass], for_ever=True)

    def plan(self, **changes: Any) -> CanaryPlan:
        """A rollout in few and quick looks."""
        fields: dict[str, Any] = {
            "endpoint_id": self.endpoint,
            "baseline_deployment_id": self.baseline,
            "candidate_deployment_id": self.candidate,
            "steps": [25, 50, 100],
            "look_every_seconds": 0.001,
            "min_looks_per_step": 2,
            "stale_looks": 2,
            "missing_looks": 4,
            "bake_looks": 2,
            "bake_weight": None,
        }
        return CanaryPlan.model_validate(fields | changes)

    def shares(self) -> dict[str, int]:
        """The split as the service has it: whole, and between two."""
        endpoint = self.direct.canary_endpoints.get(self.endpoint)
        shares = {one.id: one.traffic_percentage for one in endpoint.deployments}
        assert sum(shares.values()) == 100
        assert len(set(shares) - {self.baseline}) <= 1
        return shares

    @property
    def weight(self) -> int:
        """The candidate's share now."""
        return 100 - self.shares().get(self.baseline, 0)

    async def _tick_and_pass(self, exchange: Exchange) -> None:
        await asyncio.to_thread(self.tick)
        await passed(exchange)

    def tick(self) -> None:
        """A bucket of traffic under the present split, and its end."""
        shares = self.shares()
        weight = 100 - shares.get(self.baseline, 0)
        if self.seen[-1:] != [weight]:
            self.seen.append(weight)
        for name, share in shares.items():
            self._serve(name, self.per_bucket * share // 100)
        self._into_the_middle_of_the_next_bucket()
        self.ticks += 1
        self.at_tick.pop(self.ticks, lambda: None)()

    def _serve(self, deployment_id: str, count: int) -> None:
        now = self.service.clock().timestamp()
        for number in range(count):
            self.service.parts.recorder.record(
                Observation(
                    deployment_id=deployment_id,
                    endpoint_id=self.endpoint,
                    ended_at=now,
                    outcome=RequestOutcome.SERVER_ERROR
                    if number % ERRORS_IN == ERRORS_IN - 1
                    else RequestOutcome.SUCCESS,
                    latency_ms=self.slower * (100.0 + 3.0 * (37 * number % 100)),
                    prompt_tokens=10,
                    completion_tokens=10,
                    caller=number,
                )
            )

    def _into_the_middle_of_the_next_bucket(self) -> None:
        """A bucket's end and the lag of its counting are then half a minute away, however long the looks take."""
        now = self.service.clock()
        begun = timedelta(seconds=now.second, microseconds=now.microsecond)
        self.service.clock.ahead += BUCKET - begun + BUCKET / 2


class Trainings:
    """Plays every training of a service while it is entered: four steps, then the end that is asked for."""

    def __init__(self, stage: Stage) -> None:
        """All of them complete unless `ending` is told to do something else."""
        self._stage = stage
        self.ending: Callable[[PlayedTrainer], object] = PlayedTrainer.complete
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._play)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """No more."""
        self._is_over.set()
        self._thread.join()

    def _play(self) -> None:
        trainers, played = self._stage.service.engines.trainers, 0
        while not self._is_over.wait(0.02):
            for trainer in trainers[played:]:
                played += 1
                trainer.start_of(len(LOSSES))
                for step, loss in enumerate(LOSSES, start=1):
                    trainer.step(step, loss, evaluated=True)
                self.ending(trainer)
