"""One step as the models see it: the tokens of all sequences in one flat row, without padding.

First one token of every decoding sequence (row 0, 1, ...), then the whole prompts of the joiners.
`engine` builds it, `cache` attends over it, `lora` routes it.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from tuneship.serving.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """T flat tokens of R sequences, the first `decoding` of which bring one token each."""

    tokens: Tensor
    """[T] token ids."""
    positions: Tensor
    """[T] position of each token in its own sequence."""
    rows: Tensor
    """[T] cache row of each token."""
    last: Tensor
    """[R] where in T each sequence's newest token is: only there are logits needed."""
    decoding: int
    prompts: tuple[tuple[int, int], ...]
    """(start, stop) in T of each joiner's prompt."""
    length: int
    """Cached tokens of the longest sequence after this step."""

    @classmethod
    def of(cls, running: Items[Sequence], joined: int) -> "Batch":
        """The next step of `running`, whose last `joined` sequences are new."""
        decoding = len(running) - joined
        tokens = [sequence.generated[-1] for sequence in running[:decoding]]
        positions = [sequence.length - 1 for sequence in running[:decoding]]
        rows = list(range(decoding))
        prompts: list[tuple[int, int]] = []
        for row in range(decoding, len(running)):
            prompt = running[row].request.tokens
            prompts.append((len(tokens), len(tokens) + len(prompt)))
            tokens.extend(prompt)
            positions.extend(range(len(prompt)))
            rows.extend([row] * len(prompt))
        last = list(range(decoding)) + [stop - 1 for _, stop in prompts]
        return cls(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            rows=torch.tensor(rows),
            last=torch.tensor(last),
            decoding=decoding,
            prompts=tuple(prompts),
            length=max(positions) + 1,
        )
