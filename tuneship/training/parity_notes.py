"""Saves the tuned model's logits for a few fixed prompts beside its adapter, for the parity check at load time.

The file and the check are in `tuneship/parity.py`.
"""

from pathlib import Path

import torch
from torch import Tensor

from tuneship import parity
from tuneship.training.learner import Learner
from tuneship.training.tokenized_examples import Encoder

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
        probes.append(probe_of(messages, prompt, learner.next_logits(prompt)))
    dtype = str(learner.model.dtype).removeprefix("torch.")
    parity.Parity(dtype, probes).save(directory, key)


def probe_of(messages: list[dict[str, str]], prompt: list[int], logits: Tensor) -> parity.Probe:
    """The part of the logits [vocabulary] after a prompt that is kept."""
    last = len(logits) - 1
    even = torch.linspace(0, last, EVENLY_SPACED_TOKENS, device=logits.device).long()
    likeliest = logits.topk(min(LIKELIEST_TOKENS, len(logits))).indices
    tokens = torch.cat([likeliest, even]).unique()
    return parity.Probe(
        messages=messages,
        prompt=prompt,
        tokens=tokens.tolist(),
        logits=logits[tokens].tolist(),
        spread=float(logits.std()),
    )
