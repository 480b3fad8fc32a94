"""Measures the latency that a deployment adds to its engine, and an endpoint to its deployment, for a single token.

    python benchmarks/serving_overhead.py [--requests 300]

The same tuned model and prompt on four paths: a bare replica process over its socket, and a running service over HTTP
by deployment, by plain endpoint and by canary endpoint. A round requests these three, beginning with another one each
time, and the engine before each of them, so that all find the processor's caches equally warm. Prints medians, the
median of the differences within a round, and the CPU time of the service process, which on a busy machine is the only
figure without waits for a core. All four must answer the same before a number is printed. Requests are prepared bytes
on a kept connection, and answers are parsed after the clock has stopped, so that no HTTP library is measured.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from measuring.load import Server, service
from measuring.prepared import RequestPath, own_cpu_ms
from measuring.replicas import replica
from measuring.running import Running, deploy, example_rows, exported, job_on, running, tune, upload

from tuneship.client import Client
from tuneship.contract.endpoints import CanaryEndpointCreate, EndpointCreate, Member
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.serving.replica_client import GenerateRequest, SocketLink

PROMPT = "Which ICD-10-CM chapter does this diagnosis belong to? Fracture of rib"
WARM_UP = 20
ENGINE = "engine"
# Milliseconds of each round, by path.
Spans = dict[str, list[float]]


def main() -> None:
    """Serve one model on four paths, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    count = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "data") as live:
        model, servers = _servers(live)
        adapter = exported(live, model, Path(folder) / "adapter")
        spans, busy = asyncio.run(_measure(live, servers, adapter, count))
    for name, found in spans.items():
        cpu = (
            f", {statistics.median(busy[name]):6.2f} ms of the service's CPU time"
            if name in busy
            else ""
        )
        print(f"{name:38} {statistics.median(found):8.2f} ms (best {min(found):.2f}){cpu}")
    _print_difference(spans, "deployment", ENGINE, 2.0)
    for name in ("endpoint", "canary endpoint"):
        _print_difference(spans, name, "deployment", 1.0)
        more = statistics.median(busy[name]) - statistics.median(busy["deployment"])
        print(f"{name + ' beyond deployment':38} {more:8.2f} ms of the service's CPU time")


def _servers(live: Running) -> tuple[str, dict[str, Server]]:
    """Tune a model and serve it; returns its name and the paths over HTTP."""
    with Client(live.settings) as client:
        training = upload(client, "training", example_rows("hospital_a.jsonl", 64))
        validation = upload(client, "validation", example_rows("validation.jsonl", 32))
        model = str(tune(client, job_on(training, validation)).fine_tuned_model)
        one, two = deploy(client, model, "one"), deploy(client, model, "two")
        plain = client.endpoints.create(EndpointCreate(name="plain", deployment_id=one))
        split = [Member(id=one, traffic_percentage=90), Member(id=two, traffic_percentage=10)]
        canary = client.canary_endpoints.create(
            CanaryEndpointCreate(name="canary", deployments=split)
        )
    paths = {
        "deployment": f"/v1/deployments/{one}",
        "endpoint": f"/v1/endpoints/{plain.id}",
        "canary endpoint": f"/v1/endpoints/{canary.id}",
    }
    return model, {name: service(live, path) for name, path in paths.items()}


async def _measure(
    live: Running, servers: dict[str, Server], adapter: Path, count: int
) -> tuple[Spans, Spans]:
    """Milliseconds of each round, by the clock and of the service's CPU time."""
    base = Catalogue().default
    turns = [{"role": "user", "content": PROMPT}]
    text = base.text_format.template.render(turns, add_generation_prompt=True)
    tokens = tuple(base.tokenizer.encode(text, add_special_tokens=False).ids)
    request = GenerateRequest(tokens, 1, adapter="a", stop_tokens=base.text_format.stop_tokens)
    spans, busy = Spans(), Spans()
    async with replica(base.path) as line:
        await line.load("a", adapter)
        paths = [RequestPath(name, server, PROMPT) for name, server in servers.items()]
        for number in range(WARM_UP + count):
            took, cpu = Spans(), dict[str, float]()
            first = number % len(paths)
            for path in paths[first:] + paths[:first]:
                begun = time.perf_counter()
                found = [token for chunk in await _chunks(line, request) for token in chunk]
                took.setdefault(ENGINE, []).append(time.perf_counter() - begun)
                before, begun = own_cpu_ms(live.pid), time.perf_counter()
                answer = path.ask()
                took[path.name] = [time.perf_counter() - begun]
                cpu[path.name] = own_cpu_ms(live.pid) - before
                if path.text(answer) != base.tokenizer.decode(found):
                    raise SystemExit(f"the {path.name} answers otherwise than the engine")
            if number >= WARM_UP:
                for name, seconds in took.items():
                    spans.setdefault(name, []).append(statistics.median(seconds) * 1000)
                for name, milliseconds in cpu.items():
                    busy.setdefault(name, []).append(milliseconds)
    return spans, busy


async def _chunks(line: SocketLink, request: GenerateRequest) -> list[list[int]]:
    return [chunk async for chunk in line.generate(request)]


def _print_difference(spans: Spans, name: str, below: str, target_ms: float) -> None:
    more = [a - b for a, b in zip(spans[name], spans[below], strict=True)]
    text = f"{name} beyond {below}"
    print(f"{text:38} {statistics.median(more):8.2f} ms, target {target_ms:.0f} ms")


if __name__ == "__main__":
    main()
