"""Which tokens' keys and values lie in which row of the cache: a prompt that begins alike computes only the rest.

A row keeps them after its sequence has ended, until something else is written there. Only what was found finite is
known here. Knows no tensors; `engine` copies rows, and tells what it did to them.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tuneship.serving.scheduler import Move
from tuneship.serving.sequence import Sequence

MINIMUM = 16
"""Tokens in common from which on a copy is worth its while."""

Scope = tuple[str | None, str]
"""Adapter and queue. Keys and values follow from the adapter; what was asked in another queue is not to be felt."""


@dataclass(frozen=True, slots=True)
class _Held:
    scope: Scope
    tokens: NDArray[np.int32]
    """Of the sequence that is or was in the row."""
    known: int
    """So many of them have their keys and values there."""


class Prefixes:
    """The contents of all rows, and the longest beginning that a prompt shares with one of them."""

    def __init__(self, rows: int) -> None:
        """Nothing is known of any row."""
        self._held: list[_Held | None] = [None] * rows

    def join(self, sequence: Sequence) -> Move | None:
        """A sequence gets its row: what to copy there. The source is the row itself where it holds that already.

        Its last token is always computed, because its logits are wanted.
        """
        request = sequence.request
        scope = (request.adapter, request.queue)
        tokens = np.array(request.tokens, dtype=np.int32)
        source, length = self._longest(scope, tokens[:-1], sequence.row)
        self._held[sequence.row] = _Held(scope, tokens, length)
        return Move(source, sequence.row, length) if length else None

    def hold(self, sequence: Sequence) -> None:
        """Its prompt has entered and its numbers are finite. Of its newest token nothing was computed yet."""
        held = self._held[sequence.row]
        if held is not None:
            tokens = np.append(held.tokens, np.array(sequence.generated[:-1], dtype=np.int32))
            self._held[sequence.row] = replace(held, tokens=tokens, known=len(tokens))

    def move(self, move: Move) -> None:
        """Rows were copied: now both hold the same."""
        held = self._held[move.source]
        self._held[move.target] = held and replace(held, known=min(held.known, move.length))

    def forget_row(self, row: int) -> None:
        """It was cleared."""
        self._held[row] = None

    def forget_adapter(self, adapter: str) -> None:
        """Its name may stand for another one soon."""
        self._held = [
            None if held is None or held.scope[0] == adapter else held for held in self._held
        ]

    def crop(self, rows: int, length: int) -> None:
        """The storage has become so small, or is."""
        for row, held in enumerate(self._held):
            if held is not None and (row >= rows or held.known > length):
                self._held[row] = replace(held, known=length) if row < rows else None

    def _longest(self, scope: Scope, wanted: NDArray[np.int32], row: int) -> tuple[int, int]:
        """A row and how many of the wanted tokens it begins with; its own row if that is as good."""
        source, best = row, MINIMUM - 1
        for candidate in (row, *range(len(self._held))):
            held = self._held[candidate]
            if held is None or held.scope != scope or min(held.known, len(wanted)) <= best:
                continue
            if held.tokens[best] == wanted[best]:  # else it is no longer than the best
                length = _common(held.tokens[: held.known], wanted)
                if length > best:
                    source, best = candidate, length
        return (source, best) if best >= MINIMUM else (row, 0)


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """How many tokens from the start are the same."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    place = int(differs.argmax())
    return place if differs[place] else length
