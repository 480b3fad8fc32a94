"""The parity check of a loaded adapter: base model and adapter must answer as they did when training ended.

A wrong scale, another base model of the same shape, a different attention: each shows in the logits of a few prompts,
before the first request is served. Prompts and logits are stored beside the adapter (`tuneship/parity.py`).
"""

from pathlib import Path

import torch
from torch import Tensor

from tuneship.parity import PARITY_FILE, Parity
from tuneship.serving.adapters import AdapterRefused
from tuneship.serving.batch import FlatBatch
from tuneship.serving.kv_cache import SlotCache
from tuneship.serving.lora import Lora
from tuneship.serving.model import CausalModel
from tuneship.serving.sequence import GenerateRequest, Sequence


def check_parity(
    model: CausalModel, lora: Lora, adapter: str, directory: Path, key: str | None = None
) -> None:
    """Compare a loaded adapter with the logits in its directory. Raises `AdapterRefused`.

    An adapter that was tuned elsewhere has nothing to compare with and passes. The KV cache of the requests in flight
    is not used.
    """
    try:
        parity = Parity.load(directory, key)
    except (OSError, ValueError) as error:
        raise AdapterRefused(
            f"{PARITY_FILE} of the adapter cannot be read: {type(error).__name__}"
        ) from error
    if parity is None:
        return
    tolerance = parity.tolerance(model.facts.weights)
    for probe in parity.probes:
        highest = max([*probe.prompt, *probe.tokens], default=-1)
        if not probe.prompt or highest >= model.facts.vocabulary:
            raise AdapterRefused("the adapter was tuned on a base model with another vocabulary")
        logits = _next_logits(model, lora, adapter, tuple(probe.prompt))
        distance = probe.distance(logits[probe.tokens].tolist())
        if not distance <= tolerance:  # also refuses NaN
            raise AdapterRefused(
                f"base model and adapter answer otherwise than after training: logits differ by {distance:.2g} of "
                f"their spread, {tolerance:.2g} is allowed; the base model is another one, or its files have changed"
            )


def _next_logits(model: CausalModel, lora: Lora, adapter: str, prompt: tuple[int, ...]) -> Tensor:
    """Logits [vocabulary] of the adapter after a prompt, with a KV cache of their own."""
    request = GenerateRequest(prompt, max_tokens=1, adapter=adapter)
    sequence = Sequence("parity", request, token_limit=1, slot=0)
    cache = SlotCache.of_one(model.facts.cache, len(prompt))
    lora.acquire(adapter)
    try:
        routes = lora.route([], [(adapter, 0, len(prompt))])
        with torch.inference_mode():
            return model.forward(FlatBatch.of([sequence], [len(prompt)]), cache, lora, routes)[0]
    finally:
        lora.release(adapter)
