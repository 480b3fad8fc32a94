"""Rows of tokens with a loss mask, and the encoder that makes them from text.

A text is tokenised once, as a whole. The tokens of each prompt within it are compared with those that generation asks
with, so that the model answers after exactly the tokens that it was trained on. Knows neither files nor models. Next:
`objective.py` (which text is learnt), `data_files.py`, `batches.py`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tuneship.prompts.template import PromptTemplate
from tuneship.prompts.text_format import ModelTextFormat, token_at

# Prompts that end alike are tokenised once: most do, from the last special token on.
REMEMBERED_PROMPTS = 4096


@dataclass(frozen=True)
class TokenizedExamples:
    """Tokenized rows in one array, at 5 bytes a token for any number of rows."""

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


class EncodedRow(NamedTuple):
    """The tokens of a row, not yet cut at the context length."""

    tokens: list[int]
    loss_mask: list[bool]
    # Whether generation would ask for each target after exactly the tokens that stand before it here.
    is_asked_alike: bool


class _Asked(NamedTuple):
    """The end of a prompt within a row, from its last special token on."""

    row: int
    text: str
    tokens: list[int]


def _behind(encoding: Any, character: int, characters: int) -> int:
    """The index of the first token that has nothing of the text before a character."""
    index = token_at(encoding, character, characters)
    # A token may hold the end of one part of the text and the beginning of the next, like `>` and a line break.
    is_across = index < len(encoding.ids) and encoding.token_to_chars(index)[0] < character
    return index + is_across


@dataclass(frozen=True)
class Encoder:
    """Turns text into tokens for one base model."""

    format: ModelTextFormat
    # Tokens.
    context_length: int
    # The number of tokens that the model knows: ids from 0 below it.
    vocabulary: int

    def encode(self, rows: Sequence[Sequence[Segment]]) -> list[EncodedRow]:
        """Tokens and loss mask of each row."""
        untyped: Any = self.format.tokenizer
        texts = ["".join(segment.text for segment in row) for row in rows]
        encodings = untyped.encode_batch(texts, add_special_tokens=False)
        encoded: list[EncodedRow] = []
        asked: list[_Asked] = []
        for number, (row, text, encoding) in enumerate(zip(rows, texts, encodings, strict=True)):
            ids: list[int] = encoding.ids
            loss_mask = [False] * len(ids)
            start = 0
            for segment in row:
                end = start + len(segment.text)
                if segment.is_target:
                    first = token_at(encoding, start, len(text))
                    after = len(ids) if end == len(text) else token_at(encoding, end, len(text))
                    after = self._end_of_target(encoding, text, first, after)
                    if self.format.stop_text is not None:
                        place = segment.text.rfind(self.format.stop_text)
                        stop = start + place + len(self.format.stop_text)
                        after = after if place < 0 else _behind(encoding, stop, len(text))
                    loss_mask[first:after] = [True] * (after - first)
                    asked.append(self._asked(number, encoding, ids[:first], text, start))
                start = end
            encoded.append(EncodedRow(ids, loss_mask, is_asked_alike=True))
        for number in self._asked_otherwise(asked):
            encoded[number] = encoded[number]._replace(is_asked_alike=False)
        return encoded

    def _end_of_target(self, encoding: Any, text: str, first: int, after: int) -> int:
        """The index after the last learnt token; text that a template writes after the end of a turn is not learnt."""
        ids: list[int] = encoding.ids
        last = next((i for i in range(after - 1, first - 1, -1) if ids[i] in self.end_tokens), None)
        if last is None:
            return after
        # Some templates end the conversation with another end token, perhaps behind a line break: an answer has the
        # first of them.
        for place in range(last - 1, first - 1, -1):
            begin, end = encoding.token_to_chars(place)
            if ids[place] in self.end_tokens:
                last = place
            elif text[begin:end].strip():
                break
        return last + 1

    def _asked(self, row: int, encoding: Any, ids: list[int], text: str, start: int) -> _Asked:
        """The end of the prompt before character `start` of a row's text, and the prompt's tokens in `ids`."""
        added = self._added
        # Tokenizers cut a text at added tokens before anything else, so what stands before the last one cannot matter.
        for index in range(len(ids) - 1, -1, -1):
            if ids[index] in added:
                begin, end = encoding.token_to_chars(index)
                # The token of unknown characters stands for other texts, and cuts none.
                if text[begin:end].strip() == added[ids[index]].strip():
                    return _Asked(row, text[begin:start], ids[index:])
        return _Asked(row, text[:start], ids)

    def _asked_otherwise(self, asked: Sequence[_Asked]) -> set[int]:
        """The rows whose prompt has other tokens alone than inside the row."""
        known = self._prompts
        if len(known) > REMEMBERED_PROMPTS:
            known.clear()
        untyped: Any = self.format.tokenizer
        new = [text for text in dict.fromkeys(one.text for one in asked) if text not in known]
        encodings = untyped.encode_batch_fast(new, add_special_tokens=False)
        known |= {text: encoding.ids for text, encoding in zip(new, encodings, strict=True)}
        return {one.row for one in asked if known[one.text] != one.tokens}

    @property
    def template(self) -> PromptTemplate:
        """The template of the format."""
        return self.format.template

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the format."""
        return self.format.tokenizer

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end generation; none if a text ends an answer."""
        return () if self.format.stop_text else self.format.stop_tokens

    @cached_property
    def _added(self) -> dict[int, str]:
        added = self.format.tokenizer.get_added_tokens_decoder()
        return {token: one.content for token, one in added.items()}

    @cached_property
    def _prompts(self) -> dict[str, list[int]]:
        return {}
