"""Measures what OpenAI's API costs beyond the main API: the time of a single token, and tokens/s of 32 clients.

    python benchmarks/openai_facade.py [--requests 300] [--rounds 7] [--prompts 128] [--clients 32]

The same deployment of a tuned model answers the same prompts on both paths, by its id. Turns alternate: one request on
each path, and bursts of all prompts on each path. Prints medians, the median of the differences within a turn, the CPU
time of the service process, and the ratio of the rates within a round. Requests for a single token are prepared bytes
on a kept connection; bursts come from one thread a client. Both paths must answer the same texts before a number is
printed.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring.load import Answer, Round, Server, burst, service
from measuring.prepared import RequestPath, own_cpu_ms
from measuring.running import (
    Running,
    deploy,
    example_questions,
    example_rows,
    job_on,
    running,
    tune,
    upload,
)

from tuneship.client import Client

PROMPT = "Which ICD-10-CM chapter does this diagnosis belong to? Fracture of rib"
WARM_UP = 20
MOST_TOKENS = 48
MAIN, FACADE = "the main API", "OpenAI's API"


def main() -> None:
    """Serve one model, measure both paths, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--clients", type=int, default=32)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "data") as live:
        servers = _servers(live)
        single = _single_tokens(live, servers, wanted.requests)
        bursts = _bursts(servers, wanted.clients, wanted.rounds, wanted.prompts)
    _print_single(single)
    _print_bursts(bursts, wanted.clients)


def _servers(live: Running) -> dict[str, Server]:
    """Tune a model and serve it; returns both paths to its deployment."""
    with Client(live.settings) as client:
        training = upload(client, "training", example_rows("hospital_a.jsonl", 64))
        validation = upload(client, "validation", example_rows("validation.jsonl", 32))
        model = str(tune(client, job_on(training, validation)).fine_tuned_model)
        deployment = deploy(client, model, "one")
    plain = service(live, f"/v1/deployments/{deployment}")

    def question(prompt: str, most: int) -> dict[str, Any]:
        return {"model": deployment, **plain.question(prompt, most)}

    facade = replace(
        plain,
        path="/openai/v1/chat/completions",
        headers={"Authorization": plain.headers["Authorization"]},
        question=question,
        answer=_answer,
    )
    return {MAIN: plain, FACADE: facade}


def _answer(found: dict[str, Any]) -> Answer:
    return Answer(found["choices"][0]["message"]["content"], found["usage"]["completion_tokens"])


def _single_tokens(
    live: Running, servers: dict[str, Server], count: int
) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of each turn by the clock and of the service's CPU time, by path."""
    paths = [RequestPath(name, server, PROMPT) for name, server in servers.items()]
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    for number in range(WARM_UP + count):
        texts = set[str]()
        for path in paths[:: -1 if number % 2 else 1]:
            busy, begun = own_cpu_ms(live.pid), time.perf_counter()
            answer = path.ask()
            took = (time.perf_counter() - begun) * 1000, own_cpu_ms(live.pid) - busy
            texts.add(path.text(answer))
            if number >= WARM_UP:
                spans[path.name].append(took)
        if len(texts) != 1:
            raise SystemExit("the two APIs answer different tokens")
    return spans


def _bursts(
    servers: dict[str, Server], clients: int, rounds: int, count: int
) -> dict[str, list[Round]]:
    """Bursts of both paths in turns, after one of each that is not counted."""
    prompts = example_questions(count)
    found: dict[str, list[Round]] = {name: [] for name in servers}
    for number in range(1 + rounds):
        for name in [*servers][:: -1 if number % 2 else 1]:
            found[name].append(burst([servers[name]], clients, prompts, MOST_TOKENS))
    texts = {
        tuple(sorted((prompt, answer.text) for _, prompt, answer in one.answers))
        for bursts in found.values()
        for one in bursts
    }
    if len(texts) != 1:
        raise SystemExit("the two APIs answer different texts")
    return {name: bursts[1:] for name, bursts in found.items()}


def _print_single(spans: dict[str, list[tuple[float, float]]]) -> None:
    for name, found in spans.items():
        clock, cpu = (statistics.median(one[kind] for one in found) for kind in (0, 1))
        print(
            f"one token through {name:20} {clock:8.2f} ms, {cpu:6.2f} ms of the service's CPU time"
        )
    pairs = list(zip(spans[FACADE], spans[MAIN], strict=True))
    clock, cpu = (
        statistics.median(one[kind] - other[kind] for one, other in pairs) for kind in (0, 1)
    )
    text = f"{FACADE} beyond {MAIN}"
    print(f"{text:38} {clock:8.2f} ms, target 0.5 ms; {cpu:.2f} ms of the service's CPU time")


def _print_bursts(bursts: dict[str, list[Round]], clients: int) -> None:
    rates: tuple[tuple[str, Callable[[Round], float]], ...] = (
        ("tokens/s", lambda one: one.tokens_per_s),
        ("tokens per CPU second", lambda one: one.tokens_per_cpu_s),
    )
    for unit, rate in rates:
        for name, found in bursts.items():
            median = statistics.median(map(rate, found))
            print(f"{clients} clients through {name:20} {median:8.0f} {unit}")
        ratios = [
            rate(one) / rate(other) for one, other in zip(bursts[FACADE], bursts[MAIN], strict=True)
        ]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"{FACADE} beside {MAIN}: {statistics.median(ratios):.2f}x {unit} ({spread}), target 0.95x"
        )


if __name__ == "__main__":
    main()
