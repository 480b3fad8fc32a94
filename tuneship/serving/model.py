"""What the engine asks of a base model, and which implementation a directory gets.

`llama` reads the weights of Llama and its kin by itself: no transformers to import, and steps of small models are up to
twice as quick. Everything else goes through transformers in `generic`.
"""

import json
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tuneship.serving.batch import FlatBatch
from tuneship.serving.kv_cache import CacheShape, SlotCache
from tuneship.serving.linear import product_seconds
from tuneship.serving.lora import Lora, Routes, Site


class ModelRefused(Exception):
    """The base model cannot be served; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What others need to know of a loaded model."""

    parameters: int
    vocabulary: int
    context_length: int
    cache: CacheShape


class CausalModel(Protocol):
    """A causal language model over flat batches."""

    @property
    def facts(self) -> ModelFacts:
        """Sizes."""
        ...

    @property
    def sites(self) -> Items[Site]:
        """Where adapters apply, in the order of the numbers that `forward` gives to `Lora.add`."""
        ...

    def forward(self, batch: FlatBatch, cache: SlotCache, lora: Lora, routes: Routes) -> Tensor:
        """Logits [R, vocabulary] of each sequence's newest token; writes keys and values to the cache."""
        ...


def read_config(directory: Path) -> dict[str, Any]:
    """The model's config.json; raises `ModelRefused`."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(
            f"config.json of the base model cannot be read: {type(error).__name__}"
        ) from error
    if not isinstance(config, dict):
        raise ModelRefused("config.json of the base model is not an object")
    return config


def choose_dtype(name: str, parameters: int) -> torch.dtype:
    """`auto`: float32 for small models, where conversions cost most; else whichever this machine computes faster."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if parameters < SMALL_MODEL:
        return torch.float32
    return min((torch.float32, torch.bfloat16), key=product_seconds)


# Parameters below which one thread and float32 are fastest.
SMALL_MODEL = 5_000_000
