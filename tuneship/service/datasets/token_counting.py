"""Counts the tokens of many texts. Knows no dataset; next: `reading.py`, which counts beside its reading.

The tokenizer works without Python's lock and on every core, and is given little at a time, so that memory does not
grow with what is counted: an encoded token takes about a hundred bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

# Characters that the tokenizer is given at once.
AT_ONCE = 64 << 10
# A longer text is counted in slices, cut at a space where there is one: its count may be off by a
# token a slice.
SLICE = 32 << 10
REMEMBERED = 4096
# Short texts that come again (labels, system turns) are counted once.
REMEMBERED_LENGTH = 256


class TokenCounter:
    """Token counts of one file's texts; used by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Remember nothing yet."""
        untyped: Any = tokenizer
        self._encode: Callable[..., Sequence[Any]] = untyped.encode_batch_fast
        self._known: dict[str, int] = {}

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, without special tokens."""
        known = self._known
        if len(known) > REMEMBERED:
            known.clear()
        new = [text for text in dict.fromkeys(texts) if text not in known]
        counted = dict(zip(new, self._counts(new), strict=True))
        known.update(one for one in counted.items() if len(one[0]) <= REMEMBERED_LENGTH)
        return [counted[text] if text in counted else known[text] for text in texts]

    def _counts(self, texts: Sequence[str]) -> list[int]:
        counts = [0] * len(texts)
        places: list[int] = []
        pieces: list[str] = []
        size = 0
        for place, text in enumerate(texts):
            for piece in slices(text):
                places.append(place)
                pieces.append(piece)
                size += len(piece)
                if size >= AT_ONCE:
                    self._add(counts, places, pieces)
                    places, pieces, size = [], [], 0
        self._add(counts, places, pieces)
        return counts

    def _add(self, counts: list[int], places: Sequence[int], pieces: Sequence[str]) -> None:
        encoded = self._encode(pieces, add_special_tokens=False)
        for place, one in zip(places, encoded, strict=True):
            counts[place] += len(one)


def slices(text: str) -> Iterator[str]:
    """The text in pieces of at most `SLICE` characters."""
    start = 0
    while len(text) - start > SLICE:
        end = start + SLICE
        space = text.rfind(" ", start + SLICE // 2, end)
        end = space if space > 0 else end
        yield text[start:end]
        start = end
    yield text[start:]
