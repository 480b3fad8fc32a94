"""Support for rollouts against the real service behind a proxy, with simulated traffic: one minute of it per look.

The service's clock advances by one bucket whenever the pipeline asks for the baseline's state, which it does once per
look. So a rollout takes seconds, decides the same on any machine, and a test can act at a given bucket (`at_tick`).
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from pydantic import SecretStr

from tests.support.fakes.proxy import Exchange, Proxy, passed
from tests.support.service.engines import PlayedTrainer
from tests.support.service.in_process import Service
from tuneship.client import Client
from tuneship.gates.plan import CanaryPlan
from tuneship.metrics.observations import Observation, RequestOutcome
from tuneship.prefect.connection import connect, disconnect
from tuneship.settings import ClientSettings

BUCKET = timedelta(minutes=1)
PER_BUCKET = 600
# One request out of this many fails in a bucket, on either deployment.
ERRORS_IN = 300
# Losses of a training that learns; the simulated perplexity corresponds to a loss of 0.69.
LOSSES = (0.74, 0.72, 0.71, 0.70)
# Number of buckets with traffic for the baseline alone, before a rollout.
BEFORE = 3


class Stage:
    """A service with two deployments, an endpoint that gives the baseline all traffic, and users; to be entered."""

    def __init__(self, folder: Path, ahead: timedelta = timedelta(), **settings: Any) -> None:
        """`ahead`: how far the service's clock runs ahead of the test's. `settings`: the settings of the service."""
        self.service = Service(folder / "data", **settings)
        self.service.clock.ahead = ahead
        # Actions by the number of rollout buckets after which they are run.
        self.at_tick: dict[int, Callable[[], object]] = {}
        self.per_bucket = PER_BUCKET
        # Factor on the latency of every request, on either deployment.
        self.slower = 1.0
        # One of the candidate's requests out of this many fails in a bucket.
        self.candidate_errors_in = ERRORS_IN
        self.ticks = -BEFORE
        # The candidate's shares in the order of the buckets; a share that did not change is listed once.
        self.seen: list[int] = []
        self.baseline = self.candidate = self.endpoint = ""
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        """Start the service and the proxy, and send every task's requests through the proxy."""
        service = self._resources.enter_context(self.service)
        service.listen()
        port = int(service.url.rpartition(":")[2])
        self.proxy = self._resources.enter_context(Proxy(port))
        self.direct = self._resources.enter_context(Client(self.settings(service.url)))
        connect(self.settings(f"http://127.0.0.1:{self.proxy.port}"))
        self._resources.callback(disconnect)
        self._into_the_middle_of_the_next_bucket()
        return self

    def __exit__(self, *_: object) -> None:
        """Shut everything down."""
        self._resources.close()

    def settings(self, url: str) -> ClientSettings:
        """Return the settings of a client that connects to this address."""
        key = self.service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        return ClientSettings(url=url, api_key=SecretStr(key), client_id="alice")

    def set_up(self) -> None:
        """Create both deployments and their endpoint."""
        self.baseline = self.service.deployment("base")
        self.candidate = self.service.deployment("new")
        shares = {self.baseline: 100, self.candidate: 0}
        self._open(shares)

    def set_up_alone(self) -> None:
        """Create the baseline and its endpoint; a release adds the candidate."""
        self.baseline = self.service.deployment("base")
        self._open({self.baseline: 100})

    def _open(self, shares: dict[str, int]) -> None:
        """Start the traffic and let looks move the clock; `proxy.heal()` stops that together with all faults."""
        self.endpoint = self.service.canary("shop", shares)
        for _ in range(BEFORE):
            self.tick()
        self.let_looks_tick()

    def let_looks_tick(self) -> None:
        """Let every look of the pipeline move the clock by one bucket."""
        path = f"/v1/deployments/{self.baseline}"
        self.proxy.play("GET", path, [self._tick_and_pass], for_ever=True)

    def plan(self, **changes: Any) -> CanaryPlan:
        """Return the plan of a rollout with few and quick looks."""
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
        """Return the split as the service reports it, and check that it sums to 100 over at most two deployments."""
        endpoint = self.direct.canary_endpoints.get(self.endpoint)
        shares = {one.id: one.traffic_percentage for one in endpoint.deployments}
        assert sum(shares.values()) == 100
        assert len(set(shares) - {self.baseline}) <= 1
        return shares

    @property
    def weight(self) -> int:
        """The candidate's present share."""
        return 100 - self.shares().get(self.baseline, 0)

    async def _tick_and_pass(self, exchange: Exchange) -> None:
        await asyncio.to_thread(self.tick)
        await passed(exchange)

    def tick(self) -> None:
        """Record one bucket of traffic under the present split and end the bucket."""
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
        errors_in = ERRORS_IN if deployment_id == self.baseline else self.candidate_errors_in
        for number in range(count):
            self.service.parts.recorder.record(
                Observation(
                    deployment_id=deployment_id,
                    endpoint_id=self.endpoint,
                    ended_at=now,
                    outcome=RequestOutcome.SERVER_ERROR
                    if number % errors_in == errors_in - 1
                    else RequestOutcome.SUCCESS,
                    latency_ms=self.slower * (100.0 + 3.0 * (37 * number % 100)),
                    prompt_tokens=10,
                    completion_tokens=10,
                    caller=number,
                )
            )

    def _into_the_middle_of_the_next_bucket(self) -> None:
        """Move the clock to the middle of the next bucket, so that even slow looks do not reach the bucket's end."""
        now = self.service.clock()
        begun = timedelta(seconds=now.second, microseconds=now.microsecond)
        self.service.clock.ahead += BUCKET - begun + BUCKET / 2


class Trainings:
    """Simulates every training of a service while it is entered: four steps, then the end given by `ending`."""

    def __init__(self, stage: Stage) -> None:
        """Let every training complete unless `ending` is set to something else."""
        self._stage = stage
        self.ending: Callable[[PlayedTrainer], object] = PlayedTrainer.complete
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._play)

    def __enter__(self) -> Self:
        """Start simulating."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop simulating."""
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
