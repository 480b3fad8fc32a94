"""Measures what an evaluation costs beside the bare generation of its answers, and what callers notice of one.

    python benchmarks/evaluations.py [--examples 1000] [--rounds 3] [--phases 6]

A tuned model and its base are deployed, with a split between them. In turns, a batch and an evaluation ask both for
answers to the same prompts: by the clock, and in CPU time of the service and its replica. Then callers ask through the
split, one request after the other with pauses, in phases with and without a running evaluation. Every example must have
been scored, and every caller answered, before a number is printed. Tuning takes half a minute.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from measuring.load import Server, ask, connected
from measuring.load import service as service_of
from measuring.running import (
    Running,
    cpu_seconds,
    deploy,
    example_questions,
    example_rows,
    job_on,
    running,
    tune,
    upload,
)

from tuneship.client import Client
from tuneship.contract.endpoints import CanaryEndpointCreate, Member
from tuneship.contract.evaluations import OPEN, EvaluationCreate
from tuneship.contract.openai.batches import OPEN as OPEN_BATCH

GRADERS = [{"name": "chapter", "type": "string_check"}]
ANSWER_TOKENS, CALLER_TOKENS = 32, 16
TARGET, TARGET_P95 = 1.3, 1.05
POLL_S = 0.02


def main() -> None:
    """Deploy, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--phases", type=int, default=6, help="with an evaluation, and as many without"
    )
    parser.add_argument("--requests", type=int, default=200, help="of a phase")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "data") as live,
        Client(live.settings) as client,
    ):
        bench = Bench(live, client, chosen.examples)
        bench.compare_cost(chosen.rounds)
        bench.compare_latency(chosen.phases, chosen.requests)


class Bench:
    """Two deployments, the examples that both answer, and a split between them."""

    def __init__(self, live: Running, client: Client, examples: int) -> None:
        """Tune a model, deploy it and its base, upload the examples."""
        self._live, self._client, self._examples = live, client, examples
        training = upload(client, "training", example_rows("hospital_a.jsonl", 640))
        validation = upload(client, "validation", example_rows("validation.jsonl", 32))
        model = str(tune(client, job_on(training, validation)).fine_tuned_model)
        self._pair = [deploy(client, model, "tuned"), deploy(client, "tuneship-tiny", "base")]
        self._rows = _rows(examples)
        self._dataset = upload(client, "held out", self._rows)
        split = [
            Member(id=one, traffic_percentage=share)
            for one, share in zip(self._pair, (10, 90), strict=True)
        ]
        made = client.canary_endpoints.create(
            CanaryEndpointCreate(name="callers", deployments=split)
        )
        self._endpoint = f"/v1/endpoints/{made.id}"

    def compare_cost(self, rounds: int) -> None:
        """Print the cost of evaluations beside that of batches which ask for the same answers."""
        spent: dict[str, list[tuple[float, float]]] = {"batch": [], "evaluation": []}
        # The first round is a warm-up.
        for number in range(rounds + 1):
            for name, work in (("batch", self._batch), ("evaluation", self._evaluation)):
                found = _spent(self._live, work)
                if number:
                    spent[name].append(found)
        for place, what in enumerate(("by the clock", "of CPU time")):
            batch, evaluation = (
                statistics.median(one[place] for one in spent[name]) for name in spent
            )
            pairs = zip(spent["batch"], spent["evaluation"], strict=True)
            ratio = statistics.median(b[place] / a[place] for a, b in pairs)
            print(
                f"{self._examples} examples, two models: {evaluation:6.2f} s {what}, a batch {batch:6.2f} s: "
                f"{ratio:.2f}x, target {TARGET}x"
            )

    def compare_latency(self, phases: int, requests: int) -> None:
        """Print the latency of callers through the split beside an evaluation, and without one."""
        server = service_of(self._live, self._endpoint)
        idle, beside = list[list[float]](), list[list[float]]()
        _latencies(server, requests)
        for _ in range(phases):
            idle.append(_latencies(server, requests))
            made = self._begun(max_examples=100_000)
            beside.append(_latencies(server, requests))
            if self._client.evaluations.get(made).status not in OPEN:
                raise SystemExit(
                    "the evaluation was over before its phase: more examples are needed"
                )
            self._client.evaluations.cancel(made)
        for name, share in (("median", 0.5), ("p95", 0.95)):
            pairs = [
                (_quantile(one, share), _quantile(other, share))
                for one, other in zip(idle, beside, strict=True)
            ]
            ratios = sorted(other / one for one, other in pairs)
            all_idle, all_beside = (
                _quantile([each for phase in many for each in phase], share)
                for many in (idle, beside)
            )
            target = f", target {TARGET_P95}x" if name == "p95" else ""
            print(
                f"callers' {name}: {1000 * all_idle:6.1f} ms, {1000 * all_beside:6.1f} ms beside an evaluation: "
                f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f}){target}"
            )

    def _begun(self, **fields: Any) -> str:
        order = {
            "name": "bench",
            "dataset_id": self._dataset,
            "candidate": self._pair[0],
            "baseline": self._pair[1],
            "graders": GRADERS,
            "max_tokens": ANSWER_TOKENS,
            "stop_early": False,
        }
        return self._client.evaluations.create(EvaluationCreate.model_validate(order | fields)).id

    def _evaluation(self) -> None:
        made = self._begun(max_examples=self._examples)
        while (found := self._client.evaluations.get(made)).status in OPEN:
            time.sleep(POLL_S)
        if found.examples.scored + found.examples.leaked != self._examples:
            raise SystemExit(f"the evaluation ended as {found.status}: {found.examples}")

    def _batch(self) -> None:
        lines = [
            json.dumps(
                {
                    "custom_id": f"{number} {one}",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": {
                        "model": one,
                        "messages": [{"role": "user", "content": json.loads(row)["instruction"]}],
                        "max_tokens": ANSWER_TOKENS,
                        "temperature": 0,
                    },
                }
            )
            for number, row in enumerate(self._rows)
            for one in self._pair
        ]
        settings = self._live.settings
        key = {"Authorization": f"Bearer {settings.api_key.get_secret_value()}"}
        with httpx.Client(base_url=f"{settings.url}/openai/v1", headers=key, timeout=60) as http:
            sent = http.post(
                "/files",
                data={"purpose": "batch"},
                files={"file": ("night.jsonl", "\n".join(lines).encode())},
            ).json()
            order = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
            made = http.post("/batches", json={"input_file_id": sent["id"], **order}).json()
            while (found := http.get(f"/batches/{made['id']}").json())["status"] in OPEN_BATCH:
                time.sleep(POLL_S)
        if found["request_counts"]["completed"] != len(lines):
            raise SystemExit(f"the batch ended as {found['status']}: {found['request_counts']}")


def _rows(count: int) -> list[bytes]:
    """Examples of the validation file, again with another word where it has too few."""
    rows = [json.loads(line) for line in example_rows("validation.jsonl", count)]
    return [
        json.dumps(
            {
                "instruction": f"{rows[n % len(rows)]['instruction']} ({n // len(rows)})",
                "response": rows[n % len(rows)]["response"],
            }
        ).encode()
        + b"\n"
        for n in range(count)
    ]


def _spent(live: Running, work: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU time of the service and its processes."""
    begun, cpu = time.perf_counter(), cpu_seconds(live.pid)
    work()
    return time.perf_counter() - begun, cpu_seconds(live.pid) - cpu


def _latencies(server: Server, count: int) -> list[float]:
    """Seconds of each of so many requests, with pauses like those of several callers."""
    found: list[float] = []
    line, dice = connected(server), random.Random(count)
    for prompt in (example_questions(min(count, 200)) * (count // 200 + 1))[:count]:
        time.sleep(dice.expovariate(1 / 0.05))
        begun = time.perf_counter()
        ask(server, line, prompt, CALLER_TOKENS)
        found.append(time.perf_counter() - begun)
    line.close()
    return found


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


if __name__ == "__main__":
    main()
