"""How much of a batch goes through the model at once, so that memory is enough: the rest follows in further parts.

The gradient is that of the whole batch, however it is cut. What a token takes is measured on the model itself, not
guessed from its kind. Next: `learner.py`, `run.py`.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from tuneship.training.batches import PaddedBatch, collate
from tuneship.training.learner import Learner
from tuneship.training.tokenized_examples import TokenizedExamples

# More at once is not quicker, on CPU or GPU.
MOST_TOKENS = 16_384
# Gradients on the way back take about as much again as what is kept for them; others use the
# machine too.
SHARE_OF_FREE = 0.5


def tokens_at_once(bytes_per_token: float, free: int) -> int:
    """A power of two, so that small differences in free memory do not change how a job is computed."""
    affordable = int(SHARE_OF_FREE * free / bytes_per_token)
    return min(MOST_TOKENS, 1 << max(0, affordable.bit_length() - 1))


def bytes_per_token(learner: Learner, rows: TokenizedExamples) -> float:
    """Kept between a forward and a backward pass, measured on the longest row as if all of it were learnt.

    That is the most: attention takes its share by length, and logits theirs by what is learnt.
    """
    longest = collate(rows, np.array([rows.lengths.argmax()]))
    whole = replace(
        longest,
        places=np.arange(longest.tokens.size - 1),
        targets=longest.tokens.ravel()[1:],
    )
    return _bytes_kept(learner, whole) / longest.tokens.size


def _bytes_kept(learner: Learner, batch: PaddedBatch) -> int:
    """Of tensors that autograd saves, each storage once, without the model's own weights."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = learner.loss(
            batch
        )  # alive until the sum is made: a freed storage's address would be used again
    weights = {w.untyped_storage().data_ptr() for w in _tensors(learner.model)}
    taken = sum(size for place, size in kept.items() if place not in weights)
    del loss
    return taken


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
