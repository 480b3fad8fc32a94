"""Measures the share of the processor's matmul rate that a decode step of 32 sequences reaches (80 M parameters).

    python benchmarks/serving_peak.py [--steps 30]

One process and thread alternates between a large matmul (by torch, and by whichever library is faster here, which is
the peak), a step of the engine, and the bare matmuls of such a step, with weights of the same sizes in the engine's
memory layout. All in CPU time of the thread, so that other programs count less; they still take memory bandwidth, which
the large matmul hardly needs and the other two do. A step's work is 2 operations per weight and sequence; attention is
not counted. The tokens are compared with those of transformers before a number is printed.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # noqa: TID251 - before torch is loaded
import torch
from measuring.replicas import linear_layers, random_base
from transformers import AutoModelForCausalLM

from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.models.linear import Product
from tuneship.serving.replica import load_model
from tuneship.serving.sequence import GenerateRequest

ROWS, PROMPT_TOKENS, SIDE = 32, 57, 1024


def main() -> None:
    """Measure both number formats."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        base = random_base(Path(folder))
        for dtype in ("float32", "bfloat16"):
            _measure(base, dtype, steps)


def _measure(base: Path, dtype: str, steps: int) -> None:
    model = load_model(base, dtype)
    engine = Engine(model, EngineLimits(slots=ROWS, prompt_tokens=ROWS * PROMPT_TOKENS))
    draws = random.Random(0)
    prompts = [
        tuple(draws.randrange(model.facts.vocabulary) for _ in range(PROMPT_TOKENS))
        for _ in range(ROWS)
    ]
    for row, prompt in enumerate(prompts):
        engine.submit(str(row), GenerateRequest(prompt, steps + 2))
    tokens = [dict(engine.step().tokens) for _ in range(2)]
    square = torch.randn(SIDE, SIDE, dtype=getattr(torch, dtype))
    laid_out = Product(square)
    products = _products(base, square.dtype)
    plain, peaks, rates, bare = [], [], [], []
    work = 2 * model.facts.parameters * ROWS
    for _ in range(steps):
        plain.append(2 * SIDE**3 / _seconds(lambda: square @ square))
        peaks.append(max(plain[-1], 2 * SIDE**3 / _seconds(lambda: laid_out(square))))
        rates.append(work / _seconds(lambda: tokens.append(dict(engine.step().tokens))))
        bare.append(work / _seconds(lambda: [product(x) for x, product in products]))
    if dtype == "float32":
        _check(base, prompts[0], [one["0"] for one in tokens])
    rate, peak = statistics.median(rates), statistics.median(peaks)
    shares = [rate / statistics.median(beside) for beside in (plain, bare)]
    print(
        f"{model.facts.parameters / 1e6:.0f} M parameters, {dtype}: peak {peak / 1e9:.0f} GFLOP/s, "
        f"step {rate / 1e9:.0f}: {rate / peak:.0%} (best of each {max(rates) / max(peaks):.0%}), target 70%; "
        f"{shares[0]:.0%} of torch's own large product ({statistics.median(plain) / 1e9:.0f}), "
        f"{shares[1]:.0%} of the bare products of the step ({statistics.median(bare) / 1e9:.0f})"
    )


def _seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _products(base: Path, dtype: torch.dtype) -> list[tuple[torch.Tensor, Product]]:
    """Inputs and weights of every matmul of a step, each weight in memory of its own as in a model."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    shapes = [*linear_layers(base).values()] * config["num_hidden_layers"]
    shapes.append((config["hidden_size"], config["vocab_size"]))
    rows = {width: torch.randn(ROWS, width, dtype=dtype) for width, _ in shapes}
    return [(rows[width], Product(torch.randn(out, width).to(dtype))) for width, out in shapes]


def _check(base: Path, prompt: tuple[int, ...], tokens: list[int]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = tokens[:8]
    made = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=len(expected),
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    if made[0, len(prompt) :].tolist() != expected:
        raise SystemExit("the engine's tokens are not those of transformers")


if __name__ == "__main__":
    main()
