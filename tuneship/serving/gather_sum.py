"""Weighted sums of lines of a matrix: what adapters and the attention of generating rows are made of.

torch's embedding bag reads each line once, in the order in which it lies in memory, and needs no padding, no groups and
no products; for the few tokens of a step it is faster than any arrangement of small matrix products that was tried.
"""

import torch
from torch import Tensor


def weighted_sums(matrix: Tensor, lines: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """[sums, width]: of the lines of matrix [..., width], int32 numbers, each weighted, from one start to the next."""
    flat = matrix.view(-1, matrix.shape[-1])
    return torch.embedding_bag(flat, lines, starts, False, 0, False, weights)[0]
