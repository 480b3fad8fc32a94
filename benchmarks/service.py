"""Measures the waiting times of a user of `tuneship serve`, through its HTTP address.

    python benchmarks/service.py

Prints the seconds until the service is ready, tokens per second with 1 and with 16 clients, the time of a request that
only reads, and the processor time of the service's process while nobody asks it anything. Every answer is checked
before a number is printed. `adapters.py` measures the time from the last training step to the first answer.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from measuring.running import (
    deploy,
    example_rows,
    job_on,
    own_cpu_seconds,
    running,
    start,
    stop,
    tune,
    upload,
)

from tuneship.client import Client
from tuneship.contract.generation import Generate
from tuneship.contract.jobs import Job

IDLE_S = 20.0
PROMPT = "Which ICD-10-CM chapter does this diagnosis belong to? Fracture of rib"


def tuned(client: Client, rows: int) -> Job:
    """Run a small job to its end."""
    training = upload(client, "training", example_rows("hospital_a.jsonl", rows))
    validation = upload(client, "validation", example_rows("validation.jsonl", 64))
    return tune(client, job_on(training, validation))


def answer(client: Client, deployment_id: str, tokens: int) -> int:
    """Generate once and return the number of tokens; the temperature is so high that nearly all reach `tokens`."""
    request = Generate(prompt=PROMPT, max_tokens=tokens, temperature=2)
    reply = client.deployments.generate(deployment_id, request)
    if not 1 <= reply.usage.completion_tokens <= tokens:
        raise SystemExit("a generation has a wrong number of tokens")
    return reply.usage.completion_tokens


def in_parallel(clients: int, work: Callable[[], int], seconds: float) -> float:
    """Tokens per second of `clients` threads that repeat `work`."""
    totals = [0] * clients
    deadline = time.perf_counter() + seconds

    def loop(place: int) -> None:
        while time.perf_counter() < deadline:
            totals[place] += work()

    threads = [threading.Thread(target=loop, args=(place,)) for place in range(clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(totals) / (time.perf_counter() - begun)


def throughput(client: Client, deployment_id: str, seconds: float, rounds: int) -> None:
    """Compare one client with sixteen, in alternating rounds."""
    rates: dict[int, list[float]] = {1: [], 16: []}
    for _ in range(rounds):
        for clients, found in rates.items():
            found.append(in_parallel(clients, lambda: answer(client, deployment_id, 48), seconds))
    one, many = (statistics.median(rates[clients]) for clients in (1, 16))
    print(f"generation, 1 client                                       {one:8.0f} tokens/s")
    print(f"generation, 16 clients                                     {many:8.0f} tokens/s")
    print(f"16 clients beside 1                                        {many / one:8.2f} x")


def reading(client: Client, deployment_id: str) -> None:
    """Measure a request that only reads; `serving_overhead.py` measures the overhead of a generation."""
    spans: list[float] = []
    for _ in range(200):
        begun = time.perf_counter()
        client.deployments.get(deployment_id)
        spans.append((time.perf_counter() - begun) * 1000)
    print(
        f"get deployment through HTTP, median                        {statistics.median(spans):8.2f} ms"
    )


def idling(pid: int, seconds: float) -> None:
    """Measure the share of a core that the service's own process uses while it has nothing to do."""
    before = own_cpu_seconds(pid)
    time.sleep(seconds)
    share = (own_cpu_seconds(pid) - before) / seconds
    print(
        f"processor time without any request                         {share * 100:8.1f} % of a core"
    )


def main() -> None:
    """Run everything on a fresh data directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=320, help="training rows of the small job")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a throughput round")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        waits: list[float] = []
        for _ in range(5):
            process, waited = start(data_dir)
            waits.append(waited)
            stop(process)
        print(f"service ready, first start                                 {waits[0]:8.2f} s")
        print(
            f"service ready, median of later starts                      {statistics.median(waits[1:]):8.2f} s"
        )
        with running(data_dir) as service, Client(service.settings) as client:
            job = tuned(client, chosen.rows)
            deployment_id = deploy(client, str(job.fine_tuned_model), "bench")
            throughput(client, deployment_id, chosen.seconds, chosen.rounds)
            reading(client, deployment_id)
            idling(service.pid, IDLE_S)


if __name__ == "__main__":
    main()
