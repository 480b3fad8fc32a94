"""A request for embeddings of texts, and the answer while its vectors arrive. Depends on neither torch nor the socket.

`replica_client` sends an `EmbedRequest`; `embeddings` computes it.
"""

import asyncio
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import StrEnum
from typing import cast


class Pooling(StrEnum):
    """How the hidden states of a text's tokens become one vector."""

    MEAN = "mean"
    # The state of the last token, which alone has seen the whole text.
    LAST = "last"


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Texts to embed, and the adapter to use. The caller has checked the ranges."""

    # Token ids of each text.
    texts: tuple[tuple[int, ...], ...]
    # Name of the adapter; None uses the base model.
    adapter: str | None = None
    pooling: Pooling = Pooling.MEAN
    # Numbers to keep of each vector, from the first on; None keeps all.
    dimensions: int | None = None
    # Id of the tenant: while texts wait, owners take turns, however many texts each of them has.
    owner: str = ""
    # It gives way to all others: its texts are read while no other ones wait.
    is_background: bool = False


class ArrivingEmbeddings:
    """The vectors of one request, which arrive in several frames; `complete` has them all."""

    def __init__(self, count: int) -> None:
        """Wait for this many vectors."""
        self._vectors: list[str | None] = [None] * count
        self._missing = count
        # The vectors in the order of the texts, each as float32 numbers in Base64; or the error.
        self.complete: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    def add(self, number: int, vector: str) -> None:
        """Take the vector of the text with this number."""
        self._missing -= self._vectors[number] is None
        self._vectors[number] = vector
        if not self._missing and not self.complete.done():
            self.complete.set_result([one for one in self._vectors if one is not None])

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended."""
        if not self.complete.done():
            self.complete.set_exception(error)


def texts_of(listed: Items[Items[object]]) -> tuple[tuple[int, ...], ...]:
    """Read the texts of a frame. Raises `TypeError` for anything but whole numbers."""
    texts = tuple(tuple(text) for text in listed)
    if any(type(token) is not int for text in texts for token in text):
        raise TypeError("a token is not a whole number")
    return cast("tuple[tuple[int, ...], ...]", texts)
