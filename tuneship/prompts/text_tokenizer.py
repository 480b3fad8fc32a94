"""A model's tokenizer with the meaning of transformers, without transformers; and text as a continuation of other text.

Knows no template. Next: `text_format.py` (how an answer begins and ends).
"""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer, processors

TOKENIZER_FILE = "tokenizer.json"
# The kinds of `tokenizers` from whose tokens the text can be read back. Others (WordPiece, WordLevel) lose spaces.
KINDS = ("BPE", "Unigram")
# Tokens that are looked at for some text before an answer.
MOST_TOKENS_BEFORE = 16
# A text that a tokenizer must give back as it is.
EVERYTHING_KEPT = "Zq 17 é"


class TokenizerFault(Exception):
    """The tokenizer cannot be used; the message continues a sentence that begins with the model."""


def load_tokenizer(directory: Path) -> Tokenizer:
    """The fast tokenizer of a model directory. Raises TokenizerFault.

    Truncation and padding that somebody saved in the file are settings of one call for transformers, so they are off.
    """
    try:
        # Not `from_file`: it reads with the interpreter's lock held, so a file that hangs would stop every thread.
        content = (directory / TOKENIZER_FILE).read_bytes()
        tokenizer: Any = cast("Any", Tokenizer).from_buffer(content)
    except Exception as error:  # tokenizers raises bare exceptions for every kind of fault
        raise TokenizerFault(f"its {TOKENIZER_FILE} cannot be read") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Tokens are found by the characters that they stand for: their spaces are some of them.
    last_step: Any = tokenizer.post_processor
    for step in _steps_of(last_step):
        if getattr(step, "trim_offsets", False):
            step.trim_offsets = False
    if last_step is not None:
        tokenizer.post_processor = last_step
    return tokenizer


def _steps_of(post_processor: Any) -> Iterator[Any]:
    """Yield a post-processor, or the parts of one that is a sequence, which has no length."""
    if not isinstance(post_processor, processors.Sequence):
        yield post_processor
        return
    untyped: Any = post_processor
    for place in count():
        try:
            step = untyped[place]
        except IndexError:
            return
        yield step


def check_kind(tokenizer: Tokenizer) -> None:
    """Raise TokenizerFault for a tokenizer that does not keep a text."""
    untyped: Any = tokenizer
    kind = type(untyped.model).__name__
    if kind not in KINDS:
        raise TokenizerFault(
            f"its tokenizer is of the kind {kind}, from whose tokens an answer cannot be read back: "
            f"those of {' and '.join(KINDS)} are served"
        )
    ids = untyped.encode(EVERYTHING_KEPT, add_special_tokens=False).ids
    if untyped.decode(ids).strip() != EVERYTHING_KEPT:
        raise TokenizerFault(
            "its tokenizer changes texts (letters, accents or spaces), so that no answer would be as it was learnt"
        )


# Unlike the tokenizer's own `encode`, both functions release Python's lock.
def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a rendered text, which has all special tokens already."""
    return cast("Any", tokenizer).encode_batch_fast([text], add_special_tokens=False)[0].ids


def encoding_of(tokenizer: Tokenizer, text: str) -> Any:
    """The tokens of a rendered text with their character positions, which takes longer than `encode`."""
    return cast("Any", tokenizer).encode_batch([text], add_special_tokens=False)[0]


def visible_end(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """The shortest end of a token list that has some text, as context for decoding the next tokens.

    Decoders treat the first token of a text differently, often by leaving out its space.
    """
    untyped: Any = tokenizer
    # A caller may send thousands of tokens without any text, and each look decodes them.
    most = min(len(tokens), MOST_TOKENS_BEFORE)
    for size in range(1, most + 1):
        if untyped.decode(tokens[-size:]).strip("\ufffd"):
            return list(tokens[-size:])
    return list(tokens[len(tokens) - most :])


def continuation(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that `tokens` add after `before`, without special tokens."""
    untyped: Any = tokenizer
    behind = visible_end(tokenizer, before)
    start: str = untyped.decode(behind)
    whole: str = untyped.decode([*behind, *tokens])
    return whole[len(start) :] if whole.startswith(start) else untyped.decode(list(tokens))


def special_texts(
    tokenizer: Tokenizer, marks: Collection[int] = (), *, is_normalized: bool = False
) -> "re.Pattern[str] | None":
    """A pattern of a tokenizer's special tokens, the longest first; None for a tokenizer without them.

    `marks` are other added tokens that count as special. `is_normalized`: only those found in normalized text.
    """
    texts = {
        token.content
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if (token.special or number in marks)
        and token.content.strip()
        and (token.normalized or not is_normalized)
    }
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
