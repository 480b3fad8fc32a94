"""Weighted sums of matrix rows, used for the deltas of adapters and the attention of decoding sequences.

torch's embedding bag reads each row once, in the order in which it lies in memory, and needs no padding, grouping or
matrix products; for the few tokens of a step it is faster than any arrangement of small matrix products that was tried.
"""

import torch
from torch import Tensor


def weighted_sums(matrix: Tensor, indices: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Sum the rows `indices` of matrix [..., width], each times its weight, from one start to the next.

    Indices (into all rows) and starts are int32; returns [len(starts), width].
    """
    flat = matrix.view(-1, matrix.shape[-1])
    return torch.embedding_bag(flat, indices, starts, False, 0, False, weights)[0]
