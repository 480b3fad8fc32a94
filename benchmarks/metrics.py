"""Measures how long a month of metrics by minutes takes, after ten million recorded observations.

    python benchmarks/metrics.py

The observations go through the recorder and the store of the product, with traffic in every minute and half of it
through an endpoint. Then a service is started on that data and requested through HTTP; the clock stops at the last
byte. Counts and percentiles are compared with exact ones before a number is printed.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from measuring.running import deploy, own_cpu_seconds, start, stop

from tuneship.client import Client
from tuneship.contract.endpoints import CanaryEndpointCreate, Member
from tuneship.metrics.observations import Observation, RequestOutcome
from tuneship.metrics.recorder import Recorder
from tuneship.settings import ClientSettings
from tuneship.store.database.database import Database, sqlite_url
from tuneship.store.records import metric_windows

DAYS = 30
MINUTES = DAYS * 24 * 60
LIMIT_MS = 200.0
SERIES = {
    "1m": {"interval": "1m"},
    "1m, latency only": {"interval": "1m", "metrics": "latency"},
    "1m, one endpoint": {"interval": "1m", "endpoint_id": "{endpoint}"},
    "5m": {"interval": "5m"},
    "1h": {"interval": "1h"},
    "1d": {"interval": "1d"},
}


class Traffic:
    """Observations of `DAYS` that end now; every minute has some."""

    def __init__(self, number: int, end: int) -> None:
        dice = np.random.default_rng(5)
        self.start = end - MINUTES * 60
        minute = np.concatenate(
            [np.arange(MINUTES), dice.integers(0, MINUTES, max(0, number - MINUTES))]
        )
        self.ended_at = np.sort(self.start + minute * 60 + dice.uniform(0, 60, len(minute)))
        self.latency_ms = dice.lognormal(5, 0.6, len(minute))
        self.failed = dice.uniform(size=len(minute)) < 0.01
        self.through_endpoint = dice.uniform(size=len(minute)) < 0.5

    def record(self, database: Database, deployment: str, endpoint: str) -> None:
        """Record all observations, hour by hour, as fast as possible."""
        recorder = Recorder()
        edges = np.searchsorted(self.ended_at, self.start + np.arange(DAYS * 24 + 1) * 3600)

        def store(windows: Any) -> None:
            with database.write() as connection:
                metric_windows.store(connection, windows, self.start + MINUTES * 60)

        for low, high in pairwise(edges):
            columns = (self.ended_at, self.latency_ms, self.failed, self.through_endpoint)
            for ended_at, latency, failed, through in zip(
                *(column[low:high].tolist() for column in columns), strict=True
            ):
                recorder.record(
                    Observation(
                        deployment_id=deployment,
                        endpoint_id=endpoint if through else "",
                        ended_at=ended_at,
                        outcome=RequestOutcome.SERVER_ERROR if failed else RequestOutcome.SUCCESS,
                        latency_ms=latency,
                        prompt_tokens=20,
                        completion_tokens=5,
                    )
                )
            recorder.hand_over(store)

    def check(self, answer: dict[str, Any]) -> None:
        """Compare the answer by minutes with all observations; exits when it is wrong."""
        requests = answer["metrics"]["error_rate"]["request_count"]
        minute = (self.ended_at.astype(np.int64) - self.start) // 60
        if requests != np.bincount(minute, minlength=MINUTES).tolist():
            raise SystemExit("a minute has a wrong number of requests")
        if answer["summary"]["error_rate"]["request_count"] != len(minute):
            raise SystemExit("the summary has a wrong number of requests")
        exact = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
        served = self.latency_ms[~self.failed]
        wanted = [np.quantile(served, quantile, method="lower") for quantile in exact.values()]
        _within(wanted, [answer["summary"]["latency"][name] for name in exact])
        series = answer["metrics"]["latency"]
        for index in range(0, MINUTES, 997):
            own = self.latency_ms[(minute == index) & ~self.failed]
            if len(series["timestamps"]) == MINUTES and len(own):
                wanted = [np.quantile(own, quantile, method="lower") for quantile in exact.values()]
                _within(wanted, [series[name][index] for name in exact])


def _within(exact: list[Any], found: list[float]) -> None:
    if not np.allclose(found, exact, rtol=0.0101, atol=0):
        raise SystemExit("a percentile is off by more than 1 %")


def prepare(client: Client) -> tuple[str, str]:
    """Create a running deployment and an endpoint that routes to it."""
    deployment_id = deploy(client, "tuneship-tiny", "bench")
    members = [Member(id=deployment_id, traffic_percentage=100)]
    endpoint = client.canary_endpoints.create(
        CanaryEndpointCreate(name="bench", deployments=members)
    )
    return deployment_id, endpoint.id


@dataclass(frozen=True)
class LoadedService:
    """A service with recorded data, and what to request from it."""

    data_dir: Path
    process: "subprocess.Popen[str]"
    deployment: str
    endpoint: str

    def measure(
        self, http: httpx.Client, path: str, query: dict[str, str], rounds: int
    ) -> tuple[list[float], float]:
        """Milliseconds of each round to the last byte, sorted, and the mean CPU milliseconds of the service."""
        spans: list[float] = []
        before = own_cpu_seconds(self.process.pid)
        for _ in range(rounds):
            begun = time.perf_counter()
            http.get(path, params=query).raise_for_status()
            spans.append((time.perf_counter() - begun) * 1000)
        return sorted(spans), (own_cpu_seconds(self.process.pid) - before) * 1000 / rounds


def ask(service: LoadedService, traffic: Traffic, rounds: int) -> float:
    """Check, then measure and print every series; returns the median by minutes."""
    chosen = ClientSettings.from_credentials(service.data_dir / "credentials.json")
    assert chosen.api_key is not None  # noqa: S101 - the service wrote it
    headers = {
        "Authorization": f"Bearer {chosen.api_key.get_secret_value()}",
        "X-Client-ID": str(chosen.client_id),
    }
    span = {
        name: f"{np.datetime64(moment, 's')}Z"
        for name, moment in (
            ("start_time", traffic.start),
            ("end_time", traffic.start + MINUTES * 60),
        )
    }
    path = f"/v1/deployments/{service.deployment}/metrics"
    medians: dict[str, float] = {}
    with httpx.Client(base_url=str(chosen.url), headers=headers, timeout=60) as http:
        begun = time.perf_counter()
        answer = http.get(path, params=span | {"interval": "1m"})
        first = (time.perf_counter() - begun) * 1000
        traffic.check(answer.raise_for_status().json())
        print(f"checked: {len(traffic.ended_at):,} requests, {MINUTES:,} minutes, percentiles")
        print(f"{'1m, first after the start':28} {first:8.0f} ms   {len(answer.content):,} bytes")
        for name, query in SERIES.items():
            more = {
                key: value.replace("{endpoint}", service.endpoint) for key, value in query.items()
            }
            spans, cpu = service.measure(http, path, span | more, rounds)
            medians[name] = statistics.median(spans)
            p95 = spans[min(len(spans) - 1, round(0.95 * len(spans)))]
            print(
                f"{name:28} {medians[name]:8.0f} ms median {p95:8.0f} ms p95 of {rounds}"
                f" {cpu:8.0f} ms of the service's CPU"
            )
    return medians["1m"]


def main() -> None:
    """Fill, check, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--observations", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=21)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        process, _ = start(data_dir)
        with Client(ClientSettings.from_credentials(data_dir / "credentials.json")) as client:
            deployment, endpoint = prepare(client)
        stop(process)
        traffic = Traffic(chosen.observations, int(time.time()) // 60 * 60)  # noqa: TID251
        file = data_dir / "tuneship.sqlite"
        database = Database(sqlite_url(file))
        begun = time.perf_counter()
        traffic.record(database, deployment, endpoint)
        database.close()
        took = time.perf_counter() - begun
        each = took / len(traffic.ended_at) * 1e6
        size = file.stat().st_size >> 20
        print(f"recorded in {took:.0f} s, {each:.1f} us each; the database has {size} MiB")
        process, _ = start(data_dir)
        try:
            median = ask(
                LoadedService(data_dir, process, deployment, endpoint), traffic, chosen.rounds
            )
        finally:
            stop(process)
        print(f"limit {LIMIT_MS:.0f} ms: {'kept' if median <= LIMIT_MS else 'NOT KEPT'}")


if __name__ == "__main__":
    main()
