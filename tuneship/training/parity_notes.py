"""Notes what the tuned model says to a few fixed prompts, beside its adapter. The other half: `tuneship/parity.py`."""

from pathlib import Path

import torch

from tuneship import parity
from tuneship.training.learner import Learner
from tuneship.training.tokenized_examples import Encoder

# Logits of so many tokens are kept: of the most likely ones, and at even distances over the
# vocabulary.
LIKELIEST, SPREAD_OUT = 8, 8


def save_parity(
    directory: Path, learner: Learner, encoder: Encoder, key: str | None = None
) -> None:
    """Of the adapter that the learner holds now; `key` seals the file."""

    def encode(text: str) -> list[int]:
        return encoder.tokenizer.encode(text, add_special_tokens=False).ids

    told = parity.prompts(encoder.template, encode, encoder.context_length)
    probes = [_probe(learner, messages, prompt) for messages, prompt in told]
    dtype = str(learner.model.dtype).removeprefix("torch.")
    parity.Parity(dtype, probes).save(directory, key)


def _probe(learner: Learner, messages: list[dict[str, str]], prompt: list[int]) -> parity.Probe:
    logits = learner.next_logits(prompt)
    even = torch.linspace(0, len(logits) - 1, SPREAD_OUT, device=logits.device).long()
    tokens = torch.cat([logits.topk(min(LIKELIEST, len(logits))).indices, even]).unique()
    return parity.Probe(
        messages=messages,
        prompt=prompt,
        tokens=tokens.tolist(),
        logits=logits[tokens].tolist(),
        spread=float(logits.std()),
    )
