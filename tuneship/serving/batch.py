"""One step as the models see it: the tokens of all sequences in one flat row, without padding.

First one token of every generating sequence, then the joiners' prompts, or as much of them as enters in this step.
`engine` builds it, `cache` attends over it, `lora` routes it.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tuneship.serving.sequence import Sequence


class Prompt(NamedTuple):
    """Tokens of one joiner in this step."""

    start: int
    stop: int
    """[start, stop) in T."""
    row: int
    """Cache row."""
    cached: int
    """Tokens of its prompt that are in the cache already."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """T flat tokens of R sequences, the first of which generate and bring one token each."""

    tokens: Tensor
    """[T] token ids."""
    positions: Tensor
    """[T] position of each token in its own sequence."""
    rows: Tensor
    """[T] cache row of each token."""
    last: Tensor
    """Where in T the newest token of each sequence is that wants another: only there are logits needed.

    That are all sequences but the last one when its prompt does not end in this step.
    """
    generating: tuple[int, ...]
    """Cache row of each generating sequence."""
    prompts: tuple[Prompt, ...]
    """What each joiner brings."""
    length: int
    """Cached tokens of the longest sequence after this step."""

    @property
    def decoding(self) -> int:
        """How many generate."""
        return len(self.generating)

    @classmethod
    def of(cls, running: Items[Sequence], parts: Items[int]) -> "FlatBatch":
        """The next step of `running`, whose last sequences bring so many tokens of their prompts each."""
        decoding = len(running) - len(parts)
        tokens = [sequence.generated[-1] for sequence in running[:decoding]]
        positions = [sequence.length - 1 for sequence in running[:decoding]]
        rows = [sequence.row for sequence in running[:decoding]]
        last = list(range(decoding))
        prompts: list[Prompt] = []
        for sequence, part in zip(running[decoding:], parts, strict=True):
            whole, cached = sequence.request.tokens, sequence.cached
            prompts.append(Prompt(len(tokens), len(tokens) + part, sequence.row, cached))
            tokens.extend(whole[cached : cached + part])
            positions.extend(range(cached, cached + part))
            rows.extend([sequence.row] * part)
            if cached + part == len(whole):
                last.append(len(tokens) - 1)
        return cls(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            rows=torch.tensor(rows),
            last=torch.tensor(last, dtype=torch.long),
            generating=tuple(rows[:decoding]),
            prompts=tuple(prompts),
            length=max(positions) + 1,
        )
