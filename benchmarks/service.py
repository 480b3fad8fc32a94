"""What a user of `tuneship serve` waits for, measured through its own HTTP address.

    python benchmarks/service.py

Prints: seconds until the service is ready; seconds from the last training step to the first answer of the new
deployment; tokens a second with 1 and with 16 clients; what HTTP and gateway add to a one-token generation. Every
answer is checked before a number is printed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tuneship.client import Client
from tuneship.contract.datasets import DatasetUpload
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.generation import Generate
from tuneship.contract.jobs import ENDED, Hyperparameters, Job, JobCreate, JobStatus
from tuneship.settings import ClientSettings

UNLIMITED = {
    "TUNESHIP_GENERATE_REQUESTS_PER_MINUTE": "0",
    "TUNESHIP_CONTROL_REQUESTS_PER_MINUTE": "0",
}
EXAMPLES = Path(__file__).parents[1] / "examples" / "icd10cm"
PROMPT = "Which ICD-10-CM chapter does this diagnosis belong to? Fracture of rib"


def start(data_dir: Path) -> tuple["subprocess.Popen[str]", float]:
    """A service on a free port, and the seconds until it said `ready`."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "tuneship.cli", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--data-dir", str(data_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=UNLIMITED,
    )
    if process.stdout is None or not process.stdout.readline().startswith("ready"):
        raise SystemExit("the service did not start")
    return process, time.perf_counter() - begun


def stop(process: "subprocess.Popen[str]") -> None:
    """End it and wait."""
    process.terminate()
    process.wait(timeout=60)


def upload(client: Client, name: str, source: str, rows: int) -> str:
    """The first rows of an example file as a dataset."""
    lines = (EXAMPLES / source).read_bytes().splitlines(keepends=True)[:rows]
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(lines))
        file.seek(0)
        return client.datasets.upload(DatasetUpload(name=name, format="instruction"), file).id


def tune(client: Client, rows: int) -> Job:
    """A small finished job."""
    job = client.jobs.create(
        JobCreate(
            base_model="tuneship-tiny",
            dataset_id=upload(client, "training", "hospital_a.jsonl", rows),
            validation_dataset_id=upload(client, "validation", "validation.jsonl", 64),
            model_name="bench",
            hyperparameters=Hyperparameters(epochs=1, batch_size=16, learning_rate=1e-3),
            validation_frequency=1,
        )
    )
    last_step_seen, shown = 0.0, 0
    while True:
        found = client.jobs.get(job.id)
        if found.current_step != shown:
            last_step_seen, shown = time.perf_counter(), found.current_step
        if found.status in ENDED:
            break
        time.sleep(0.02)
    if found.status != JobStatus.COMPLETED:
        raise SystemExit(f"the job ended as {found.status}")
    deployment_id = deploy(client, str(found.fine_tuned_model), "tuned")
    answer(client, deployment_id, 8)
    waited = time.perf_counter() - last_step_seen
    print(f"last training step to first answer of the new deployment   {waited:8.2f} s")
    return found


def deploy(client: Client, model: str, name: str) -> str:
    """A running deployment."""
    made = client.deployments.create(DeploymentCreate(model_name=model, deployment_name=name))
    while client.deployments.get(made.id).status == "creating":
        time.sleep(0.01)
    return made.id


def answer(client: Client, deployment_id: str, tokens: int) -> int:
    """One generation; its number of tokens. So hot that it nearly always goes on to `tokens`."""
    request = Generate(prompt=PROMPT, max_tokens=tokens, temperature=2)
    reply = client.deployments.generate(deployment_id, request)
    if not 1 <= reply.usage.completion_tokens <= tokens:
        raise SystemExit("a generation has a wrong number of tokens")
    return reply.usage.completion_tokens


def in_parallel(clients: int, work: Callable[[], int], seconds: float) -> float:
    """Tokens a second of `clients` threads that repeat `work`."""
    totals = [0] * clients
    end = time.perf_counter() + seconds

    def loop(place: int) -> None:
        while time.perf_counter() < end:
            totals[place] += work()

    threads = [threading.Thread(target=loop, args=(place,)) for place in range(clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(totals) / (time.perf_counter() - begun)


def throughput(client: Client, deployment_id: str, seconds: float, rounds: int) -> None:
    """One client beside sixteen, in turn."""
    rates: dict[int, list[float]] = {1: [], 16: []}
    for _ in range(rounds):
        for clients, found in rates.items():
            found.append(in_parallel(clients, lambda: answer(client, deployment_id, 48), seconds))
    one, many = (statistics.median(rates[clients]) for clients in (1, 16))
    print(f"generation, 1 client                                       {one:8.0f} tokens/s")
    print(f"generation, 16 clients                                     {many:8.0f} tokens/s")
    print(f"16 clients beside 1                                        {many / one:8.2f} x")


def overhead(client: Client, deployment_id: str) -> None:
    """A one-token generation through HTTP; the replica's own part is `benchmarks/serving_engine.py`."""
    spans: list[float] = []
    for _ in range(200):
        begun = time.perf_counter()
        answer(client, deployment_id, 1)
        spans.append((time.perf_counter() - begun) * 1000)
    health: list[float] = []
    for _ in range(200):
        begun = time.perf_counter()
        client.deployments.get(deployment_id)
        health.append((time.perf_counter() - begun) * 1000)
    print(
        f"one-token generation through HTTP, median                  {statistics.median(spans):8.2f} ms"
    )
    print(
        f"get deployment through HTTP, median                        {statistics.median(health):8.2f} ms"
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
        process, _ = start(data_dir)
        try:
            fields = json.loads((data_dir / "credentials.json").read_text())
            settings = ClientSettings(
                url=fields["base_url"], api_key=fields["api_key"], client_id=fields["client_id"]
            )
            with Client(settings) as client:
                job = tune(client, chosen.rows)
                deployment_id = deploy(client, str(job.fine_tuned_model), "bench")
                throughput(client, deployment_id, chosen.seconds, chosen.rounds)
                overhead(client, deployment_id)
        finally:
            stop(process)


if __name__ == "__main__":
    main()
