"""Saves the tuned model's logits and greedy tokens for a few fixed prompts beside its adapter, for the parity check.

The file and the check are in `tuneship/prompts/parity.py`.
"""

from pathlib import Path

import torch
from torch import Tensor

from tuneship.prompts import parity
from tuneship.training.examples.tokenized_examples import Encoder
from tuneship.training.learner import Learner

# Logits of the most likely tokens are saved, and of tokens at even distances over the vocabulary.
LIKELIEST_TOKENS = EVENLY_SPACED_TOKENS = 8


def save_parity(
    directory: Path, learner: Learner, encoder: Encoder, key: str | None = None
) -> None:
    """Write the parity file of the adapter that the learner holds now; `key` seals it."""

    def encode(text: str) -> list[int]:
        return encoder.tokenizer.encode(text, add_special_tokens=False).ids

    probes: list[parity.Probe] = []
    for messages, prompt in parity.prompts(encoder.template, encode, encoder.context_length):
        count = parity.greedy_count(prompt, encoder.context_length)
        probes.append(probe_of(messages, prompt, learner.greedy_logits(prompt, count)))
    dtype = str(learner.model.dtype).removeprefix("torch.")
    parity.Parity(dtype, probes).save(directory, key)


def probe_of(messages: list[dict[str, str]], prompt: list[int], logits: Tensor) -> parity.Probe:
    """A probe, which keeps a part of the logits [tokens, vocabulary] of the greedy tokens after a prompt."""
    first = logits[0]
    even = torch.linspace(0, len(first) - 1, EVENLY_SPACED_TOKENS, device=first.device).long()
    likeliest = first.topk(min(LIKELIEST_TOKENS, len(first))).indices
    tokens = torch.cat([likeliest, even]).unique()
    best = logits.topk(2).values
    return parity.Probe(
        messages=messages,
        prompt=prompt,
        tokens=tokens.tolist(),
        logits=first[tokens].tolist(),
        spread=float(first.std()),
        greedy=logits.argmax(dim=-1).tolist(),
        leads=((best[:, 0] - best[:, 1]) / logits.std(dim=-1)).tolist(),
    )
