"""Measures how much an answer that has to fit a schema slows the others of its batch, at the socket of a replica.

    python benchmarks/serving_schema.py [--rounds 9]

On the shipped base and on a random Llama of 80 M parameters: 32 clients, prompts of 57 tokens, 64 new tokens each,
drawn with temperature 1. Rounds in which no, one or every answer has a schema alternate; what is measured is the time
until those without a schema end (all, where every one has it). Ratios are medians over the rounds, by the clock and by
the replica's processor time. The schema was compiled before.

At the end: the tokens of greedy answers of the shipped base under other schemas, beside those of the same JSON without
any white space.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from measuring.replicas import random_base, replica
from measuring.running import cpu_seconds

from tuneship.contract.schemas.answer_schemas import read_schema
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.generation.prompts import rendered_prompt
from tuneship.serving.replica_client import GenerateRequest, SocketLink
from tuneship.serving.sampling.grammar import grammar_of

PROMPT_TOKENS, NEW_TOKENS, CLIENTS = 57, 64, 32
# Guided answers of a round.
GUIDED = (0, 1, CLIENTS)
TARGET = 1.05
# Its answers are longer than the limit, so that they are written as long as the others.
SCHEMA = {
    "type": "object",
    "properties": {
        "codes": {
            "type": "array",
            "minItems": 50,
            "items": {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "pattern": "^[A-Z][0-9]{2}$"},
                    "chapter": {"type": "string", "maxLength": 60},
                    "is_chronic": {"type": "boolean"},
                },
                "required": ["code", "chapter", "is_chronic"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["codes"],
    "additionalProperties": False,
}
# Of objects, for the tokens that answers take.
SHORT_SCHEMAS: list[dict[str, Any]] = [
    {"kind": {"type": "boolean"}},
    {"chapter": {"type": "string", "maxLength": 40}, "is_chronic": {"type": "boolean"}},
    {"color": {"enum": ["red", "green"]}, "size": {"enum": [1, 2, 3]}, "none": {"type": "null"}},
    {"numbers": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 3, "maxItems": 6}},
    {"code": {"type": "string", "pattern": "^[A-Z][0-9]{2}$"}, "is_valid": {"type": "boolean"}},
]
PROMPTS = ("senile cataract", "Which chapter is asthma in?", "Write JSON.")
_draws = random.Random(0)


def main() -> None:
    """Measure both bases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    grammar = grammar_of(read_schema(SCHEMA).schema)
    with tempfile.TemporaryDirectory() as folder:
        shipped = Catalogue().default.path
        large = random_base(Path(folder) / "base")
        (large / "tokenizer.json").write_bytes((shipped / "tokenizer.json").read_bytes())
        for name, base in {"shipped base": shipped, "80 M base": large}.items():
            print(f"{name}:")
            asyncio.run(_measure(base, grammar, chosen.rounds))
        asyncio.run(_measure_lengths())


async def _measure(base: Path, grammar: str, rounds: int) -> None:
    found: dict[int, list[tuple[float, float]]] = {guided: [] for guided in GUIDED}
    async with replica(base) as line:
        facts = line.facts
        print(f"  {facts.parameters / 1e6:.1f} M parameters, vocabulary of {facts.vocabulary}")
        # The first round is a warm-up.
        for number in range(rounds + 1):
            for guided in GUIDED:
                one = await _round(line, grammar, guided)
                if number:
                    found[guided].append(one)
    _print(found)


async def _round(line: SocketLink, grammar: str, guided: int) -> tuple[float, float]:
    """Seconds by the clock and of the processor until all free answers are written, or all where none is free."""
    began, cpu = time.monotonic(), cpu_seconds(line.facts.pid)
    generations = [
        line.generate(_request(line, grammar if client < guided else None))
        for client in range(CLIENTS)
    ]
    others = guided % CLIENTS  # the first of them
    made = [await one.read_all() for one in generations[others:]]
    seconds, used = time.monotonic() - began, cpu_seconds(line.facts.pid) - cpu
    made += [await one.read_all() for one in generations[:others]]
    if any(len(tokens) != NEW_TOKENS for tokens in made):
        raise SystemExit(f"an answer has not {NEW_TOKENS} tokens")
    return seconds, used


def _request(line: SocketLink, grammar: str | None) -> GenerateRequest:
    """A request with a random prompt, so that none has a cached prefix."""
    tokens = tuple(_draws.randrange(line.facts.vocabulary) for _ in range(PROMPT_TOKENS))
    return GenerateRequest(
        tokens,
        NEW_TOKENS,
        temperature=1.0,
        seed=_draws.randrange(1 << 30),
        stop_tokens=() if grammar is None else Catalogue().default.text_format.stop_tokens,
        grammar=grammar,
    )


async def _measure_lengths() -> None:
    base = Catalogue().default
    tokenizer: Any = base.tokenizer
    async with replica(base.path) as line:
        for is_flexible in (False, True):
            ratios: list[tuple[int, int]] = []
            for properties, prompt in product(SHORT_SCHEMAS, PROMPTS):
                schema = {
                    "type": "object",
                    "properties": properties,
                    "required": [*properties],
                    "additionalProperties": False,
                }
                grammar = grammar_of(read_schema(schema).schema, is_flexible=is_flexible)
                asked = rendered_prompt(
                    base.text_format, [{"role": "user", "content": prompt}], ""
                ).tokens
                request = GenerateRequest(
                    tuple(asked), 250, stop_tokens=base.text_format.stop_tokens, grammar=grammar
                )
                written = await line.generate(request).read_all()
                value = json.loads(tokenizer.decode(written))
                least = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
                ratios.append((len(written), len(tokenizer.encode(least).ids)))
            used, needed = (sum(numbers) for numbers in zip(*ratios, strict=True))
            most = max(one / least for one, least in ratios)
            print(
                f"{'flexible' if is_flexible else 'usual'} white space: {used / needed:.2f}x the tokens of compact "
                f"JSON, at most {most:.2f}x, {len(ratios)} answers"
            )


def _print(found: Mapping[int, list[tuple[float, float]]]) -> None:
    for guided, rounds in found.items():
        pairs = list(zip(found[0], rounds, strict=True))
        by_clock = statistics.median(one[0] / free[0] for free, one in pairs)
        by_cpu = statistics.median(one[1] / free[1] for free, one in pairs)
        rate = (
            (CLIENTS - guided or CLIENTS) * NEW_TOKENS / statistics.median(one[0] for one in rounds)
        )
        target = f", target {TARGET}" if guided == 1 else ""
        print(
            f"  {guided:2} of {CLIENTS} with a schema: {rate:6.0f} tokens/s; the others' time, beside none "
            f"{by_clock:.3f}x, by CPU time {by_cpu:.3f}x{target}"
        )


if __name__ == "__main__":
    main()
