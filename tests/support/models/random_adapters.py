"""Random adapters of the shipped base model, the texts that they write, and models made of them."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from tests.support.service.in_process import CATALOGUE
from tuneship.security.sealed_files import seal_file
from tuneship.service.generation.prompts import rendered_prompt
from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.replica import load_model
from tuneship.serving.sequence import GenerateRequest
from tuneship.store.files.blobs import Blobs

BASE = CATALOGUE.default
RANK = 4


def random_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter of the value and output projections of all layers, whose texts are its own."""
    config: Any = AutoConfig.from_pretrained(BASE.path)
    width, keys = config.hidden_size, config.num_key_value_heads * config.head_dim
    dice = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config.num_hidden_layers):
        for module, outputs in (("v_proj", keys), ("o_proj", width)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            a, b = (torch.randn(size, generator=dice) for size in ((RANK, width), (outputs, RANK)))
            tensors |= {f"{name}.lora_A.weight": a / width**0.5, f"{name}.lora_B.weight": b}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    BASE.text_format.template.save(folder)
    return folder


def texts_of(adapters: Mapping[str, Path], prompt: str, max_tokens: int) -> dict[str, str]:
    """Generate here, one after the other, what the base model writes with each adapter; returns the texts by name."""
    engine = Engine(load_model(BASE.path), EngineLimits(slots=1))
    messages = [{"role": "user", "content": prompt}]
    tokens = tuple(rendered_prompt(BASE.text_format, messages, "prompt").tokens)
    texts: dict[str, str] = {}
    for name, folder in adapters.items():
        engine.load(name, folder)
        request = GenerateRequest(
            tokens, max_tokens, name, stop_tokens=BASE.text_format.stop_tokens
        )
        engine.submit(name, request)
        texts[name] = BASE.tokenizer.decode([*_written(engine)])
        engine.unload(name)
    return texts


def _written(engine: Engine) -> Iterator[int]:
    while not engine.idle:
        yield from (token for _, token in engine.step().tokens)


def stored_model(
    blobs: Blobs, adapter: Path, client_id: str, name: str, key: str
) -> dict[str, Any]:
    """Store an adapter, sealed with this key, and return the row of a model that was trained elsewhere."""
    now, blob = datetime.now(UTC), f"models/{name}"
    sealed = adapter.with_name(f"{adapter.name}-sealed")
    sealed.mkdir()
    for file in adapter.iterdir():
        seal_file(file, sealed / file.name, key)
    return {
        "id": f"ft:{BASE.id}:{name}:{name}",
        "client_id": client_id,
        "created_at": now,
        "updated_at": now,
        "tags": {},
        "base_model": BASE.id,
        "name": name,
        "job_id": None,
        "fine_tuning_method": "lora",
        "blob": blob,
        "sha256": {file.name: blobs.put(file, f"{blob}/{file.name}") for file in sealed.iterdir()},
    }
