"""The input of one forward pass: the tokens of all sequences one after the other, without padding.

First come the decoding sequences with one token each, then the chunks of prompts that are prefilled in this step.
`engine` builds it, `kv_cache` stores its keys and values and calls `attention`, `lora` routes its tokens to adapters.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tuneship.serving.sequence import Sequence


class PrefillChunk(NamedTuple):
    """The part of one prompt that is prefilled in this step."""

    start: int
    # Its tokens are [start, stop) of the batch.
    stop: int
    # Row of the KV cache.
    slot: int
    # Tokens of the prompt that are in the KV cache already.
    cached: int
    # Tokens of the whole prompt.
    length: int


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """T flat tokens of R sequences; the decoding sequences come first and bring one token each."""

    # [T] token ids.
    tokens: Tensor
    # [T] position of each token in its own sequence.
    positions: Tensor
    # [T] row of the KV cache of each token.
    slots: Tensor
    # [R + S, or R - 1 + S] indices into T of the tokens to compute logits for.
    #
    # First the newest token of each sequence, of which a last prompt whose prefill does not end in this step has none;
    # then the S tokens of prompts behind which stands a token whose log probability was asked for.
    logit_indices: Tensor
    # Row of the KV cache of each decoding sequence.
    decode_slots: tuple[int, ...]
    prefills: tuple[PrefillChunk, ...]
    # Cached tokens of the longest sequence after this step.
    length: int

    @property
    def decode_count(self) -> int:
        """Number of decoding sequences."""
        return len(self.decode_slots)

    def lengths(self) -> Tensor:
        """[T] length of each token's text: its whole prompt, or as far as it is generated."""
        lengths = self.positions + 1
        for prefill in self.prefills:
            lengths[prefill.start : prefill.stop] = prefill.length
        return lengths

    @classmethod
    def of(cls, running: Items[Sequence], chunks: Items[int]) -> "FlatBatch":
        """Build the next step from `running`; its last sequences prefill `chunks` tokens of their prompts."""
        decode_count = len(running) - len(chunks)
        decoding = running[:decode_count]
        tokens = [sequence.generated[-1] for sequence in decoding]
        positions = [sequence.length - 1 for sequence in decoding]
        slots = [sequence.slot for sequence in decoding]
        logit_indices = list(range(decode_count))

        prefills: list[PrefillChunk] = []
        scored: list[int] = []
        for sequence, chunk in zip(running[decode_count:], chunks, strict=True):
            prompt, cached = sequence.prompt, sequence.cached
            start = len(tokens)
            prefills.append(PrefillChunk(start, start + chunk, sequence.slot, cached, len(prompt)))
            scored.extend(range(start, start + len(sequence.scored_by(chunk))))
            tokens.extend(prompt[cached : cached + chunk])
            positions.extend(range(cached, cached + chunk))
            slots.extend([sequence.slot] * chunk)
            if cached + chunk == len(prompt):
                logit_indices.append(len(tokens) - 1)

        return cls(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            logit_indices=torch.tensor(logit_indices + scored, dtype=torch.long),
            decode_slots=tuple(slots[:decode_count]),
            prefills=tuple(prefills),
            length=max(positions) + 1,
        )
