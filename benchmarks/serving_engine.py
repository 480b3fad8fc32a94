"""Compares many adapters with one, and measures the memory of an adapter, at the socket of a replica.

    python benchmarks/serving_engine.py [--rounds 5] [--base DIR]

On the shipped base and on a random Llama of 80 M parameters: 32 clients, prompts of 57 tokens, 32 new tokens each,
greedy. Rounds of one, 8 and 32 adapters alternate; ratios are medians over the rounds, by the clock and by the
replica's processor time. A single adapter is merged into small weights, one beside a request of the base is not: the
cost of mixing is the ratio to the second. In float32 a mixed batch must give the tokens that each request gets alone.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from measuring.replicas import random_adapter, random_base, replica
from measuring.running import cpu_seconds

from tuneship.service.catalogues.base_models import Catalogue
from tuneship.serving.replica_client import GenerateRequest, SocketLink

PROMPT_TOKENS, NEW_TOKENS, CLIENTS = 57, 32, 32
ONE, ONE_BESIDE = "1 adapter", "1 and the base"
# The adapter that a client requests, by the number of the client; None: the base.
MIXES: dict[str, Callable[[int], str | None]] = {
    "base": lambda _: None,
    ONE: lambda _: "0",
    ONE_BESIDE: lambda client: "0" if client else None,
    "8 adapters": lambda client: str(client % 8),
    "32 adapters": lambda client: str(client % 32),
}
LOADED = 50
MEMORY_TARGET = 1.5
_draws = random.Random(0)


@dataclass(frozen=True)
class Round:
    """One burst."""

    seconds: float
    cpu_seconds: float


def main() -> None:
    """Measure both bases, or the one that is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, help="a model directory instead of the two")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bases = {"shipped base": (Catalogue().default.path, 0.7)}
        if chosen.base:
            bases = {chosen.base.name: (chosen.base, 0.7)}
        else:
            bases["80 M base"] = (random_base(Path(folder) / "base"), 0.85)
        for number, (name, (base, target)) in enumerate(bases.items()):
            places = [Path(folder) / f"{number}.{n}" for n in range(LOADED)]
            adapters = [random_adapter(base, place) for place in places]
            print(f"{name}:")
            asyncio.run(_measure(base, adapters, chosen.rounds, target))


async def _measure(base: Path, adapters: Sequence[Path], rounds: int, target: float) -> None:
    async with replica(base) as line:
        facts = line.facts
        print(f"  {facts.parameters / 1e6:.1f} M parameters, {facts.dtype}, one thread")
        await _burst(line, [_request(line, None) for _ in range(CLIENTS)])
        await _memory(line, adapters)
        if facts.dtype == "float32":
            await _check(line)
        found: dict[str, list[Round]] = {mix: [] for mix in MIXES}
        for _ in range(rounds):
            for mix in MIXES:
                found[mix].append(await _round(line, mix))
    for mix in MIXES:
        _print(mix, found, target)


async def _memory(line: SocketLink, adapters: Sequence[Path]) -> None:
    """Measure anonymous memory per adapter, after loading all and after all have answered."""
    size = (adapters[0] / "adapter_model.safetensors").stat().st_size
    await line.stats()
    before, load_ms = _resident(line.facts.pid), []
    for number, path in enumerate(adapters):
        began = time.monotonic()
        await line.load(str(number), path)
        load_ms.append((time.monotonic() - began) * 1000)
    loaded = _resident(line.facts.pid) - before
    for start in range(0, len(adapters), CLIENTS):
        names = range(start, min(start + CLIENTS, len(adapters)))
        await _burst(line, [_request(line, str(name)) for name in names])
    # The replica returns freed memory before it answers this.
    await line.stats()
    used = _resident(line.facts.pid) - before
    print(
        f"  memory of one more adapter, in its file's size ({size / 1e6:.2f} MB): "
        f"loaded {loaded / len(adapters) / size:.2f}, used {used / len(adapters) / size:.2f}, target {MEMORY_TARGET}; "
        f"loading takes {statistics.median(load_ms):.1f} ms"
    )


async def _check(line: SocketLink) -> None:
    requests = [_request(line, MIXES["8 adapters"](client)) for client in range(CLIENTS)]
    together = await _burst(line, requests)
    for request, expected in list(zip(requests, together, strict=True))[:8]:
        alone = replace(request, queue="alone")  # nothing of its prompt is used again
        if await _burst(line, [alone]) != [expected]:
            raise SystemExit("a request in a mixed batch has other tokens than alone")


async def _round(line: SocketLink, mix: str) -> Round:
    """Measure a burst in which every client sends two consecutive requests."""
    adapters = [MIXES[mix](client) for client in range(CLIENTS)]
    requests = [[_request(line, adapter) for _ in range(2)] for adapter in adapters]
    began, cpu = time.monotonic(), cpu_seconds(line.facts.pid)
    await asyncio.gather(*(_client(line, pair) for pair in requests))
    return Round(time.monotonic() - began, cpu_seconds(line.facts.pid) - cpu)


async def _client(line: SocketLink, requests: Sequence[GenerateRequest]) -> None:
    for request in requests:
        await _burst(line, [request])


async def _burst(line: SocketLink, requests: Sequence[GenerateRequest]) -> list[list[int]]:
    """The tokens of each request; all are sent at once."""
    generations = [line.generate(request) for request in requests]
    made = [[token async for chunk in one for token in chunk] for one in generations]
    if any(len(tokens) != NEW_TOKENS for tokens in made):
        raise SystemExit(f"an answer has not {NEW_TOKENS} tokens")
    return made


def _request(line: SocketLink, adapter: str | None) -> GenerateRequest:
    """A request with a random prompt, so that none has a cached prefix."""
    vocabulary = line.facts.vocabulary
    tokens = tuple(_draws.randrange(vocabulary) for _ in range(PROMPT_TOKENS))
    return GenerateRequest(tokens, NEW_TOKENS, adapter=adapter)


def _resident(pid: int) -> int:
    """Resident bytes of a process, without file pages."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _print(mix: str, found: Mapping[str, list[Round]], target: float) -> None:
    tokens = 2 * CLIENTS * NEW_TOKENS
    rate = tokens / statistics.median(each.seconds for each in found[mix])
    per_cpu = tokens / statistics.median(each.cpu_seconds for each in found[mix])
    text = f", target {target}" if mix.endswith("adapters") else ""
    print(
        f"  {mix:14}: {rate:6.0f} tokens/s, {per_cpu:6.0f} per CPU second; beside one adapter "
        f"{_ratios(found[ONE], found[mix])}{text}; unmerged {_ratios(found[ONE_BESIDE], found[mix])}"
    )


def _ratios(one: list[Round], found: list[Round]) -> str:
    pairs = list(zip(one, found, strict=True))
    by_clock = statistics.median(a.seconds / b.seconds for a, b in pairs)
    by_cpu = statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in pairs)
    return f"{by_clock:.2f}x, by CPU time {by_cpu:.2f}x"


if __name__ == "__main__":
    main()
