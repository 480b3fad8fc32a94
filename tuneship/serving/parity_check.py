"""The parity check of a loaded adapter: base model and adapter must answer as they did when training ended.

A wrong scale, another base model of the same shape, a different attention: each shows in the logits of a few prompts or
in the first tokens of the answers, before the first request is served. They are stored beside the adapter
(`tuneship/prompts/parity.py`).
"""

from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from tuneship.prompts.parity import PARITY_FILE, Parity, Probe
from tuneship.serving.adapters import AdapterRefused
from tuneship.serving.batch import FlatBatch
from tuneship.serving.kv_cache import SlotCache
from tuneship.serving.lora import Lora
from tuneship.serving.models.model import CausalModel
from tuneship.serving.sequence import GenerateRequest, Sequence


def check_parity(
    model: CausalModel, lora: Lora, adapter: str, directory: Path, key: str | None = None
) -> None:
    """Compare a loaded adapter with the logits and greedy tokens in its directory. Raises `AdapterRefused`.

    An adapter that was tuned elsewhere has nothing to compare with and passes. The KV cache of the requests in flight
    is not used.
    """
    try:
        parity = Parity.load(directory, key)
    except (OSError, ValueError) as error:
        raise AdapterRefused(
            f"{PARITY_FILE} of the adapter cannot be read: {type(error).__name__}"
        ) from error
    if parity is None or not parity.probes:
        return
    tolerance = parity.tolerance(model.facts.weights)
    for probe in parity.probes:
        highest = max([*probe.prompt, *probe.tokens, *probe.greedy], default=-1)
        if not probe.prompt or highest >= model.facts.vocabulary:
            raise AdapterRefused("the adapter was tuned on a base model with another vocabulary")
        if len(probe.prompt) + len(probe.greedy) > model.facts.context_length:
            raise AdapterRefused(
                "the adapter was tuned on a base model with another context length"
            )
    texts = [(probe.prompt, probe.greedy) for probe in parity.probes]
    for probe, logits in zip(
        parity.probes, answer_logits(model, lora, adapter, texts), strict=True
    ):
        distance = probe.distance(logits[0][probe.tokens].tolist())
        if not distance <= tolerance:  # also refuses NaN
            raise AdapterRefused(
                f"base model and adapter answer otherwise than after training: logits differ by {distance:.2g} of "
                f"their spread, {tolerance:.2g} is allowed; the base model is another one, or its files have changed"
            )
        place = differing_choice(probe, logits, tolerance) if probe.greedy else None
        if place is not None:
            raise AdapterRefused(
                "base model and adapter answer otherwise than after training: token "
                f"{place + 1} of the answer to a fixed question is another one"
            )


def differing_choice(probe: Probe, logits: Tensor, tolerance: float) -> int | None:
    """The place of the first token that logits [tokens, vocabulary] choose differently from the probe."""
    best, choices = logits.max(dim=-1)
    if choices.tolist() == probe.greedy:
        return None
    gaps = (best - logits.gather(1, torch.tensor(probe.greedy)[:, None])[:, 0]) / logits.std(dim=-1)
    return probe.differing_choice(choices.tolist(), gaps.tolist(), tolerance)


@torch.inference_mode()
def answer_logits(
    model: CausalModel, lora: Lora, adapter: str, texts: Items[tuple[Items[int], Items[int]]]
) -> list[Tensor]:
    """Logits [tokens, vocabulary] that choose each token of an answer, for pairs of a prompt and an answer.

    Without an answer, those of the first token. All is read at once but one token of each answer, which is read alone
    as in a generation, with a KV cache of their own.
    """
    # The last token of an answer is chosen and not read.
    running = [
        Sequence(
            "parity",
            GenerateRequest((*prompt, *answer[:-2]), 1, adapter),
            1,
            [*answer[-2:-1]],
            slot,
        )
        for slot, (prompt, answer) in enumerate(texts)
    ]
    sizes = [len(sequence.request.tokens) for sequence in running]
    spans = [(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    counts = [size - len(prompt) + 1 for size, (prompt, _) in zip(sizes, texts, strict=True)]
    chosen = torch.cat(
        [torch.arange(stop - count, stop) for (_, stop), count in zip(spans, counts, strict=True)]
    )
    cache = SlotCache(model.facts.cache, len(texts), max(sizes) + 1)
    cache.resize(len(texts), max(sizes) + 1)
    lora.acquire(adapter)
    try:
        routes = lora.route([], [(adapter, *span) for span in spans])
        batch = replace(FlatBatch.of(running, sizes), logit_indices=chosen)
        rows = model.forward(batch, cache, lora, routes).split(counts)
        decoding = [sequence for sequence in running if sequence.generated]
        if not decoding:
            return [*rows]
        step = FlatBatch.of(decoding, [])
        last = model.forward(step, cache, lora, lora.route([adapter] * len(decoding), []))
    finally:
        lora.release(adapter)
    lasts = iter(last)
    return [
        torch.cat([row, next(lasts)[None]]) if sequence.generated else row
        for row, sequence in zip(rows, running, strict=True)
    ]
