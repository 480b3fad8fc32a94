"""Chooses the size of micro-batches, so that a batch of any size fits the memory (gradient accumulation).

The gradient is that of the whole batch, however it is cut. The memory per token is measured on the model itself, not
guessed from its kind. Next: `learner.py`, `training_loop.py`.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tuneship.training.examples.batches import collate
from tuneship.training.examples.tokenized_examples import TokenizedExamples
from tuneship.training.learner import Learner

# Larger micro-batches are not quicker, on CPU or GPU.
MAX_MICRO_BATCH_TOKENS = 16_384
# Backward takes about as much again as the activations that are kept for it; other processes use the machine too.
SHARE_OF_FREE_MEMORY = 0.5


def affordable_tokens(bytes_per_token: float, free_bytes: int) -> int:
    """The largest micro-batch, in padded tokens, that fits the free memory.

    A power of two, so that small differences in free memory do not change how a job is computed.
    """
    affordable = int(SHARE_OF_FREE_MEMORY * free_bytes / bytes_per_token)
    return min(MAX_MICRO_BATCH_TOKENS, 1 << max(0, affordable.bit_length() - 1))


def bytes_per_token(learner: Learner, rows: TokenizedExamples) -> float:
    """Activation memory per token between forward and backward, measured on the longest row with every token a target.

    No other micro-batch needs more per token: attention grows with the length, and logits with the targets.
    """
    longest = collate(rows, np.array([rows.lengths.argmax()]))
    batch = replace(
        longest,
        logit_positions=np.arange(longest.tokens.size - 1),
        targets=longest.tokens.ravel()[1:],
    )
    # Autograd may save one tensor several times; each storage counts once.
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = learner.loss(batch)
    # Autograd saves weights too, but those need no memory of their own.
    model_tensors = [*learner.model.parameters(), *learner.model.buffers()]
    weights = {weight.untyped_storage().data_ptr() for weight in model_tensors}
    total = sum(size for address, size in saved.items() if address not in weights)
    # The loss keeps the graph alive until here: a freed storage's address could have been used again.
    del loss
    return total / batch.tokens.size
