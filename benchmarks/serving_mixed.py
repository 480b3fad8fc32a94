"""Compares the throughput of many tuned models at once with that of one, by whole answers over HTTP.

    python benchmarks/serving_mixed.py [--rounds 7] [--requests 128]

Tunes 32 models on the shipped base and deploys them; 32 clients request greedy answers of one, 8 or 32 of the
deployments, in alternating rounds. In a mix each model must answer as it does alone. Tuning takes three minutes.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measuring.load import Answer, Round, Server, burst
from measuring.load import service as service_of
from measuring.running import example_questions, running
from measuring.writers import writers

from tuneship.client import Client

MIXES = (1, 8, 32)
TARGET = 0.7
CLIENTS, NEW_TOKENS = 32, 48


def main() -> None:
    """Tune, deploy, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=128, help="of a round")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "data") as service:
        with Client(service.settings) as client:
            made = [deployment for deployment, _ in writers(client, max(MIXES))]
        servers = [service_of(service, f"/v1/deployments/{one}") for one in made]
        _compare(servers, example_questions(chosen.requests), chosen.rounds)


def _compare(servers: Sequence[Server], prompts: Sequence[str], rounds: int) -> None:
    found: dict[int, list[Round]] = {mix: [] for mix in MIXES}
    # The first round is a warm-up.
    for number in range(rounds + 1):
        for mix in MIXES:
            one = burst(servers[:mix], CLIENTS, prompts, NEW_TOKENS)
            if number:
                found[mix].append(one)
    _check(servers, prompts, [one for many in found.values() for one in many])
    for mix in MIXES:
        _print(mix, found[mix], found[1])


def _check(servers: Sequence[Server], prompts: Sequence[str], rounds: Sequence[Round]) -> None:
    """Exit unless every model gives the same answers in a mix as alone."""
    alone: dict[tuple[str, str], Answer] = {}
    for place, server in enumerate(servers):
        own = prompts[place :: len(servers)]
        for path, prompt, answer in burst([server], len(own), own, NEW_TOKENS).answers:
            alone[path, prompt] = answer
    answers = {answer for one in rounds for answer in one.answers}
    wrong = sum(alone.get((path, prompt), answer) != answer for path, prompt, answer in answers)
    if wrong:
        raise SystemExit(f"{wrong} answers in a mix are not those of the model by itself")
    compared = sum((path, prompt) in alone for path, prompt, _ in answers)
    print(f"{compared} texts are the same in a mix and alone")


def _print(mix: int, found: list[Round], one: list[Round]) -> None:
    pairs = list(zip(one, found, strict=True))
    by_clock = statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in pairs)
    by_cpu = statistics.median(b.tokens_per_cpu_s / a.tokens_per_cpu_s for a, b in pairs)
    rate = statistics.median(each.tokens_per_s for each in found)
    target = "" if mix == 1 else f", target {TARGET}"
    print(
        f"{mix:2} models: {rate:6.0f} tokens/s; beside one {by_clock:.2f}x, by CPU time {by_cpu:.2f}x{target}"
    )


if __name__ == "__main__":
    main()
