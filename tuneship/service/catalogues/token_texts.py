"""The bytes and the text of each token of a tokenizer, for answers that name single tokens."""

import json
import re
from typing import Any, cast

from tokenizers import Tokenizer, pre_tokenizers

# How tokenizers with a fallback to bytes write a token of one byte.
ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Texts of single tokens. A tokenizer's own decoder treats the first token of a text differently."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Look at the tokenizer's decoder; a token is looked at when it is asked for."""
        self._tokenizer: Any = tokenizer
        self._added = dict(tokenizer.get_added_tokens_decoder())
        decoder: Any = json.loads(cast("Any", tokenizer).to_str())["decoder"] or {"type": None}
        steps: list[Any] = decoder.get("decoders") or [decoder]
        self._is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self._first: int = self._tokenizer.token_to_id("a") or 0
        self._known: dict[int, bytes] = {}
        self._numbers: dict[int, list[int]] = {}

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token inside of a text; none for an id that the tokenizer does not know."""
        if token not in self._known:
            self._known[token] = self._bytes(token)
        return self._known[token]

    def numbers_of(self, token: int) -> list[int]:
        """The token's bytes as numbers, in a list that all answers share."""
        if token not in self._numbers:
            self._numbers[token] = list(self.bytes_of(token))
        return self._numbers[token]

    def text_of(self, token: int) -> str:
        """The text of a token; bytes that are no whole character are written as OpenAI does."""
        content = self.bytes_of(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def is_special(self, token: int) -> bool:
        """Whether a decoded text leaves the token out."""
        return token in self._added and self._added[token].special

    def _bytes(self, token: int) -> bytes:
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in self._added:
            return self._added[token].content.encode()
        if self._is_byte_level and all(letter in BYTES_OF_LETTERS for letter in piece):
            return bytes(BYTES_OF_LETTERS[letter] for letter in piece)
        if byte := ONE_BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        before: str = self._tokenizer.decode([self._first])
        return self._tokenizer.decode([self._first, token])[len(before) :].encode()


def _bytes_of_letters() -> dict[str, int]:
    """The byte of each letter in which byte-level tokenizers write their tokens.

    Printable bytes of Latin-1 stand for themselves; the others follow in the order of their letters.
    """
    letters = set(cast("Any", pre_tokenizers.ByteLevel).alphabet())
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    rest = sorted(letters - own.keys())
    others = [byte for byte in range(256) if byte not in own.values()]
    return own | dict(zip(rest, others, strict=True))


BYTES_OF_LETTERS = _bytes_of_letters()
