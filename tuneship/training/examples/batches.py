"""The order in which rows are learnt from, and their division into batches. Pure numbers.

Knows tokenised rows and no model. Next: `packing.py` (how the model reads a batch), `training_loop.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuneship.training.examples.tokenized_examples import TokenizedExamples

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class PaddedBatch:
    """A padded rectangle of tokens, with the positions whose next token is a target.

    Padding stands at the right. A causal model's tokens do not see what follows them, and no padded position
    is learnt from: neither a mask nor a padding token of the model's own is needed.
    """

    # Shape (rows, longest row).
    tokens: NDArray[np.int64]
    # Indices into the flattened rectangle: the positions whose logits are needed.
    logit_positions: Indices
    # The token to predict at each of them.
    targets: Indices
    # Indices into the flattened rectangle: the positions that are no padding.
    token_positions: Indices

    @property
    def row_lengths(self) -> Indices:
        """The number of tokens of each row."""
        rows, width = self.tokens.shape
        return np.bincount(self.token_positions // width, minlength=rows)


def epoch_batches(rows: Indices, batch_size: int, *, seed: int, epoch: int) -> list[Indices]:
    """Every row once, in random order; the same for the same seed and epoch. The last batch may be smaller."""
    random = np.random.Generator(np.random.PCG64([seed, epoch]))
    order = random.permutation(rows)
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def split_among_ranks(rows: Indices, lengths: Indices, ranks: int) -> list[Indices]:
    """Deal `rows` to the ranks, the longest first, so that each gets about as many tokens."""
    if ranks == 1:
        return [rows]
    rows = rows[np.argsort(lengths[rows], kind="stable")[::-1]]
    return [rows[rank::ranks] for rank in range(ranks)]


def micro_batches(rows: Indices, lengths: Indices, max_tokens: int) -> Iterator[Indices]:
    """Cut `rows` into micro-batches of at most `max_tokens` with padding, longest rows first.

    A micro-batch has at least one row, also where that row is longer.
    """
    rows = rows[np.argsort(lengths[rows], kind="stable")[::-1]]
    start = 0
    while start < len(rows):
        size = max(1, max_tokens // int(lengths[rows[start]]))
        yield rows[start : start + size]
        start += size


def collate(rows: TokenizedExamples, indices: Indices) -> PaddedBatch:
    """The padded rectangle of the rows `indices`."""
    width = int(rows.lengths[indices].max())
    tokens = np.zeros((len(indices), width), dtype=np.int64)
    loss_mask = np.zeros((len(indices), width), dtype=np.bool_)
    is_token = np.arange(width) < rows.lengths[indices][:, None]
    for line, index in enumerate(indices):
        start, stop = rows.starts[index], rows.starts[index + 1]
        tokens[line, : stop - start] = rows.tokens[start:stop]
        loss_mask[line, : stop - start] = rows.loss_mask[start:stop]
    # A row's first token has no token before it to predict it from.
    loss_mask[:, 0] = False
    targets = np.flatnonzero(loss_mask)
    # Logits at one position predict the token of the next.
    return PaddedBatch(tokens, targets - 1, tokens.ravel()[targets], np.flatnonzero(is_token))
