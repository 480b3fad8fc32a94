"""Counts the tokens of many texts. Knows no dataset; next: `reading.py`, which counts while it reads on.

The tokenizer works without Python's lock and on every core. It gets few texts at a time, so that memory does not grow
with their number: an encoded token takes about a hundred bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

# Characters in one call of the tokenizer.
CHARACTERS_AT_ONCE = 64 << 10
# A longer text is counted in slices, cut at a space where there is one: its count may be off by a token per slice.
SLICE_CHARACTERS = 32 << 10
# Short texts that repeat (labels, system turns) are counted once.
REMEMBERED_TEXTS = 4096
REMEMBERED_CHARACTERS = 256


class TokenCounter:
    """Counts the tokens of one file's texts; used by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Count with this tokenizer, without any text remembered."""
        untyped: Any = tokenizer
        self._encode: Callable[..., Sequence[Any]] = untyped.encode_batch_fast
        self._known: dict[str, int] = {}

    def count(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, without special tokens."""
        known = self._known
        if len(known) > REMEMBERED_TEXTS:
            known.clear()
        new = [text for text in dict.fromkeys(texts) if text not in known]
        counts = [0] * len(new)
        owners: list[int] = []  # for each piece the index of its text
        pieces: list[str] = []
        size = 0
        for index, text in enumerate(new):
            for piece in slices(text):
                owners.append(index)
                pieces.append(piece)
                size += len(piece)
                if size >= CHARACTERS_AT_ONCE:
                    self._add(counts, owners, pieces)
                    owners, pieces, size = [], [], 0
        self._add(counts, owners, pieces)
        counted = dict(zip(new, counts, strict=True))
        known.update(one for one in counted.items() if len(one[0]) <= REMEMBERED_CHARACTERS)
        return [counted[text] if text in counted else known[text] for text in texts]

    def _add(self, counts: list[int], owners: Sequence[int], pieces: Sequence[str]) -> None:
        encoded = self._encode(pieces, add_special_tokens=False)
        for index, encoding in zip(owners, encoded, strict=True):
            counts[index] += len(encoding)


def slices(text: str) -> Iterator[str]:
    """Cut the text into pieces of at most `SLICE_CHARACTERS`."""
    start = 0
    while len(text) - start > SLICE_CHARACTERS:
        end = start + SLICE_CHARACTERS
        space = text.rfind(" ", start + SLICE_CHARACTERS // 2, end)
        end = space if space > 0 else end
        yield text[start:end]
        start = end
    yield text[start:]
