"""The interface between the engine and a base model.

`llama` implements it for Llama and similar models without transformers, which takes seconds to import; steps of small
models are up to twice as fast. `generic` implements it for all others through transformers.
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
from tuneship.serving.lora import Lora, Routes, Site
from tuneship.serving.models.linear import product_seconds

# Below this number of parameters one thread and float32 are fastest.
SMALL_MODEL_PARAMETERS = 5_000_000


class ModelRefused(Exception):
    """The base model cannot be served; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a loaded model."""

    parameters: int
    vocabulary: int
    context_length: int
    hidden_size: int
    cache: CacheShape
    # The number format of the weights: `float32`, `bfloat16`, `int8` or `int4`.
    weights: str
    # Prompts longer than this have other keys and values from their first token on (LongRoPE); None: all the same.
    short_tokens: int | None = None
    # Whether a text that grows longer than `short_tokens` has all its keys and values computed again.
    is_recomputed: bool = False


class CausalModel(Protocol):
    """A causal language model that runs flat batches."""

    @property
    def facts(self) -> ModelFacts:
        """Sizes of the model."""
        ...

    @property
    def sites(self) -> Items[Site]:
        """Products that adapters may change; `forward` passes their numbers to `Lora`."""
        ...

    def forward(self, batch: FlatBatch, cache: SlotCache, lora: Lora, routes: Routes) -> Tensor:
        """Compute logits [R, vocabulary] of `batch.logit_indices`; write keys and values to the cache."""
        ...

    def hidden(self, batch: FlatBatch, cache: SlotCache, lora: Lora, routes: Routes) -> Tensor:
        """Compute the hidden states [T, hidden size] after the final norm in float32, and write to the cache, too."""
        ...


def read_config(directory: Path) -> dict[str, Any]:
    """Read a model's config.json. Raises `ModelRefused`."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(
            f"config.json of the base model cannot be read: {type(error).__name__}"
        ) from error
    if not isinstance(config, dict):
        raise ModelRefused("config.json of the base model is not an object")
    return config


def choose_dtype(weights: str | None, parameters: int) -> torch.dtype:
    """Choose the number format of the computation by that of the weights; quantised weights take float32.

    None is float32 for small models, where conversions cost most, else the format that is faster on this machine.
    """
    if weights is not None:
        return torch.bfloat16 if weights == "bfloat16" else torch.float32
    if parameters < SMALL_MODEL_PARAMETERS:
        return torch.float32
    return min((torch.float32, torch.bfloat16), key=product_seconds)
