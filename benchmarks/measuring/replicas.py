"""A replica process without a service, and random models and adapters for it."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tuneship.serving.replica_client import SocketLink

RANK = 16


@asynccontextmanager
async def replica(
    base: Path, threads: int = 1, weights: str | None = None
) -> AsyncGenerator[SocketLink]:
    """Start a replica process and connect to it."""
    options = ["--base", str(base), "--threads", str(threads)]
    if weights is not None:
        options += ["--weights", weights]
    ours, process = _start(options)
    line = await SocketLink.open(ours)
    try:
        yield line
    finally:
        await line.aclose()
        await asyncio.to_thread(process.wait, 30)


def _start(options: list[str]) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tuneship.serving", "--fd", str(theirs.fileno()), *options]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()])


def random_base(directory: Path, **changes: int) -> Path:
    """A Llama of 80 M parameters; float32 files, served in whichever format this machine computes faster."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12288,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=11,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    config.update(changes)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def linear_layers(base: Path) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear layer that an adapter changes, by its name within a layer."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    return {
        "self_attn.q_proj": (hidden, heads * dim),
        "self_attn.k_proj": (hidden, kv_heads * dim),
        "self_attn.v_proj": (hidden, kv_heads * dim),
        "self_attn.o_proj": (heads * dim, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def random_adapter(base: Path, directory: Path) -> Path:
    """Write a random adapter for all linear layers, as peft does."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (inputs, outputs) in linear_layers(base).items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, inputs) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK) * 0.02
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    description = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": "all-linear",
    }
    (directory / "adapter_config.json").write_text(json.dumps(description), encoding="utf-8")
    return directory
