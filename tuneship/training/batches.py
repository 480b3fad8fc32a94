"""In which order and company the rows are learnt: numbers in, numbers out.

Knows tokenised rows and nothing of models. Next: `packing.py` (how the model reads a batch), `run.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuneship.training.tokenized_examples import TokenizedExamples

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class PaddedBatch:
    """A padded rectangle of tokens and the places in it whose next token is learnt.

    Padding stands at the right. A causal model's tokens do not see what follows them, and no padded place
    is learnt from: neither a mask nor a padding token of the model's own is needed.
    """

    tokens: NDArray[np.int64]
    """Shape (rows, longest row)."""
    places: Indices
    """Indices into the flattened rectangle: where a prediction is wanted."""
    targets: Indices
    """The token to predict at each place."""
    filled: Indices
    """Indices into the flattened rectangle: where a token of a row stands."""


def epoch_batches(rows: Indices, batch_size: int, *, seed: int, epoch: int) -> list[Indices]:
    """Every row once, in random order; the same for the same seed and epoch. The last batch may be smaller."""
    random = np.random.Generator(np.random.PCG64([seed, epoch]))
    order = random.permutation(rows)
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def shares(rows: Indices, lengths: Indices, count: int) -> list[Indices]:
    """Deal `rows` to `count` processes, the longest first, so that each gets about as many tokens."""
    if count == 1:
        return [rows]
    rows = rows[np.argsort(lengths[rows], kind="stable")[::-1]]
    return [rows[rank::count] for rank in range(count)]


def limited_batches(rows: Indices, lengths: Indices, most_tokens: int) -> Iterator[Indices]:
    """Cut `rows` into batches of at most `most_tokens` with padding (always at least one row), by length."""
    rows = rows[np.argsort(lengths[rows], kind="stable")[::-1]]
    start = 0
    while start < len(rows):
        size = max(1, most_tokens // int(lengths[rows[start]]))
        yield rows[start : start + size]
        start += size


def collate(rows: TokenizedExamples, indices: Indices) -> PaddedBatch:
    """The rectangle of the rows `indices`."""
    width = int(rows.lengths[indices].max())
    tokens = np.zeros((len(indices), width), dtype=np.int64)
    learnt = np.zeros((len(indices), width), dtype=np.bool_)
    filled = np.arange(width) < rows.lengths[indices][:, None]
    for line, index in enumerate(indices):
        start, stop = rows.starts[index], rows.starts[index + 1]
        tokens[line, : stop - start] = rows.tokens[start:stop]
        learnt[line, : stop - start] = rows.learnt[start:stop]
    learnt[:, 0] = False  # nothing stands before a first token to predict it from
    targets = np.flatnonzero(learnt)
    return PaddedBatch(tokens, targets - 1, tokens.ravel()[targets], np.flatnonzero(filled))
