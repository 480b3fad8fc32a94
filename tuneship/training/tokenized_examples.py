"""Rows of tokens with a loss mask, and the encoder that makes them from text.

Prompt and answer are tokenised apart, as generation does it: the model answers after exactly the tokens it was trained
on. Knows neither files nor models. Next: `objective.py` (which text is learnt), `data_files.py`, `batches.py`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tuneship.template import PromptTemplate


@dataclass(frozen=True)
class TokenizedExamples:
    """Tokenised rows, stored one after another: 5 bytes a token, whatever the number of rows."""

    tokens: NDArray[np.int32]
    # As long as `tokens`: True where the loss counts.
    loss_mask: NDArray[np.bool_]
    # Row i is `tokens[starts[i]:starts[i + 1]]`; one entry more than there are rows.
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.starts) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each row."""
        return np.diff(self.starts)

    @property
    def all_indices(self) -> NDArray[np.int64]:
        """The indices of all rows."""
        return np.arange(len(self))

    def select(self, indices: NDArray[np.int64]) -> "TokenizedExamples":
        """A copy of these rows, in this order."""
        pieces = [slice(self.starts[index], self.starts[index + 1]) for index in indices]
        return TokenizedExamples(
            np.concatenate([self.tokens[piece] for piece in pieces]),
            np.concatenate([self.loss_mask[piece] for piece in pieces]),
            np.cumsum([0, *self.lengths[indices]]),
        )

    def count_targets(self, indices: NDArray[np.int64]) -> int:
        """The number of target tokens of these rows.

        The first token of a row is none, since no token stands before it to predict it from.
        """
        return sum(
            int(np.count_nonzero(self.loss_mask[self.starts[index] + 1 : self.starts[index + 1]]))
            for index in indices
        )

    @cached_property
    def digests(self) -> list[bytes]:
        """Sixteen bytes for the content of each row."""
        return [
            hashlib.blake2b(
                self.tokens[a:b].tobytes() + self.loss_mask[a:b].tobytes(), digest_size=16
            ).digest()
            for a, b in pairwise(self.starts)
        ]


class Segment(NamedTuple):
    """A piece of a row's text: either all of it is target text or none."""

    text: str
    is_target: bool


@dataclass(frozen=True)
class Encoder:
    """Turns text into tokens for one base model."""

    template: PromptTemplate
    tokenizer: Tokenizer
    # Tokens.
    context_length: int
    # The tokens that end an answer; what the template writes after one is not learnt.
    end_tokens: frozenset[int]
    # The number of tokens that the model knows: ids from 0 below it.
    vocabulary: int

    def encode(self, rows: Sequence[Sequence[Segment]]) -> Iterator[tuple[list[int], list[bool]]]:
        """Tokens and loss mask of each row, not yet cut at the context length."""
        texts = [segment.text for row in rows for segment in row]
        encodings = iter(self.tokenizer.encode_batch(texts, add_special_tokens=False))
        for row in rows:
            tokens: list[int] = []
            loss_mask: list[bool] = []
            for segment in row:
                ids = next(encodings).ids
                counted = 0
                if segment.is_target:
                    # Some templates write a line break after the end token, which no answer has:
                    # targets reach up to the last end token, or to the end where there is none.
                    ends = (i + 1 for i in reversed(range(len(ids))) if ids[i] in self.end_tokens)
                    counted = next(ends, len(ids))
                tokens += ids
                loss_mask += [True] * counted + [False] * (len(ids) - counted)
            yield tokens, loss_mask
