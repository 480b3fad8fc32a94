"""How fast one replica answers, and what one more adapter costs: measured through its socket, as the gateway sees it.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/serving_engine.py [--base DIR] [--rounds 5]

Prints one JSON object. Prompts of 57 tokens, 32 new tokens each, greedy, no early end; medians over the rounds.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tuneship.serving.line import GenerateRequest, ReplicaLine

PROMPT_TOKENS, NEW_TOKENS = 57, 32
ADAPTERS, RANK = 50, 16


@dataclass(frozen=True)
class Case:
    """`clients` at once, each answered by one of the first `adapters` adapters (0: by the base)."""

    name: str
    adapters: int


CASES = (
    Case("base", 0),
    Case("one adapter", 1),
    Case("8 adapters", 8),
    Case("32 of 50 adapters", 32),
)
CLIENTS = (1, 8, 16, 32)


def main() -> None:
    """Build what is missing, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base", type=Path, help="model directory; without it a random Llama of 1 M parameters"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = options.base or _random_base(Path(scratch) / "base")
        adapters = [_random_adapter(base, Path(scratch) / f"adapter{n}") for n in range(ADAPTERS)]
        report = asyncio.run(_measure(base, adapters, options.rounds, options.threads))
    print(json.dumps(report, indent=2))


async def _measure(
    base: Path, adapters: Sequence[Path], rounds: int, threads: int
) -> dict[str, object]:
    began = time.monotonic()
    stream, process = _start(base, threads)
    line = await ReplicaLine.open(stream)
    report: dict[str, object] = {
        "model": _introduction(line),
        "start_s": round(time.monotonic() - began, 2),
    }
    try:
        vocabulary = line.facts.vocabulary
        await _burst(line, _requests(Case("warm-up", 0), 32, vocabulary))
        report["memory"] = await _memory(line, adapters, vocabulary)
        for case in CASES:
            report[case.name] = {
                f"{clients} clients": await _rate(
                    line, _requests(case, clients, vocabulary), rounds
                )
                for clients in CLIENTS
            }
    finally:
        await line.aclose()
        process.wait(10)
    return report


def _start(base: Path, threads: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    command = [
        sys.executable,
        "-m",
        "tuneship.serving",
        "--base",
        str(base),
        "--fd",
        str(theirs.fileno()),
    ]
    process = subprocess.Popen([*command, "--threads", str(threads)], pass_fds=[theirs.fileno()])
    theirs.close()
    return ours, process


def _introduction(line: ReplicaLine) -> dict[str, object]:
    """The replica's own words."""
    facts = line.facts
    return {
        "parameters": facts.parameters,
        "dtype": facts.dtype,
        "context_length": facts.context_length,
    }


async def _memory(line: ReplicaLine, adapters: Sequence[Path], vocabulary: int) -> dict[str, float]:
    """Resident memory per adapter: after loading all, and after all have answered."""
    file_bytes = (adapters[0] / "adapter_model.safetensors").stat().st_size
    before, load_ms = _resident(line.facts.pid), []
    for number, path in enumerate(adapters):
        began = time.monotonic()
        await line.load(str(number), path)
        load_ms.append((time.monotonic() - began) * 1000)
    loaded = _resident(line.facts.pid)
    for start in range(0, len(adapters), 32):
        names = range(start, min(start + 32, len(adapters)))
        await _burst(line, [_request(vocabulary, seed=n, adapter=str(n)) for n in names])
    used = _resident(line.facts.pid)
    return {
        "adapter_file_bytes": file_bytes,
        "resident_mb_before": round(before / 1e6, 1),
        "loaded_per_adapter_in_files": round((loaded - before) / len(adapters) / file_bytes, 2),
        "used_per_adapter_in_files": round((used - before) / len(adapters) / file_bytes, 2),
        "load_ms": round(statistics.median(load_ms), 2),
    }


async def _rate(
    line: ReplicaLine, requests: Sequence[GenerateRequest], rounds: int
) -> dict[str, float]:
    """Closed loop: every client sends its next request when the last one is answered."""
    repeats = max(2, 32 // len(requests))
    spans, busy = [], []
    for _ in range(rounds + 1):
        began, cpu = time.monotonic(), _cpu_seconds(line.facts.pid)
        await asyncio.gather(*(_client(line, request, repeats) for request in requests))
        spans.append((time.monotonic() - began) / repeats)
        busy.append((_cpu_seconds(line.facts.pid) - cpu) / repeats)
    span = statistics.median(spans[1:])
    return {
        "requests_per_s": round(len(requests) / span, 1),
        "tokens_per_s": round(len(requests) * NEW_TOKENS / span),
        "best_requests_per_s": round(len(requests) / min(spans[1:]), 1),
        "requests_per_cpu_s": round(len(requests) / statistics.median(busy[1:]), 1),
    }


async def _client(line: ReplicaLine, request: GenerateRequest, repeats: int) -> None:
    for _ in range(repeats):
        await _burst(line, [request])


async def _burst(line: ReplicaLine, requests: Sequence[GenerateRequest]) -> None:
    for generation in [line.generate(request) for request in requests]:
        made = sum([len(chunk) async for chunk in generation])
        if made != NEW_TOKENS:
            raise RuntimeError(f"{made} tokens instead of {NEW_TOKENS}")


def _requests(case: Case, clients: int, vocabulary: int) -> list[GenerateRequest]:
    return [
        _request(
            vocabulary, seed=client, adapter=str(client % case.adapters) if case.adapters else None
        )
        for client in range(clients)
    ]


def _request(vocabulary: int, *, seed: int, adapter: str | None) -> GenerateRequest:
    draws = random.Random(seed)
    tokens = tuple(draws.randrange(vocabulary) for _ in range(PROMPT_TOKENS))
    return GenerateRequest(tokens, NEW_TOKENS, adapter=adapter)


def _resident(pid: int) -> int:
    """Bytes of memory this process holds, without the pages of files."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _cpu_seconds(pid: int) -> float:
    """Processor time of the replica: tells its own cost from that of its neighbours on a busy machine."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _random_base(directory: Path) -> Path:
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def _random_adapter(base: Path, directory: Path) -> Path:
    """All linear layers, as peft would write them."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    shapes = {
        "self_attn.q_proj": (hidden, heads * dim),
        "self_attn.k_proj": (hidden, kv_heads * dim),
        "self_attn.v_proj": (hidden, kv_heads * dim),
        "self_attn.o_proj": (heads * dim, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (inputs, outputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, inputs) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK) * 0.02
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    description = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(description), encoding="utf-8")
    return directory


if __name__ == "__main__":
    main()
