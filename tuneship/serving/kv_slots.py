"""Which row of the cache each sequence gets, and what a prompt that begins like another one finds there.

A row keeps its keys and values after its sequence has ended, until another one gets it; so the one that gets it is
the one that begins alike. Only what was found finite is known here. Knows no tensors; `engine` copies rows.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuneship.serving.sequence import Sequence

# Tokens in common from which on a copy is worth its while.
MINIMUM = 16

# Adapter and queue. Keys and values follow from the adapter; what was asked in another queue is
# not to be felt.
Scope = tuple[str | None, str]


class Copy(NamedTuple):
    """The beginning of a row that is wanted in another one."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class _Held:
    scope: Scope
    tokens: NDArray[np.int32]
    """Of the sequence that is or was in the row."""
    known: int
    """So many of them have their keys and values there."""


class KvSlots:
    """The rows of the cache: who runs in which, and what the others still hold."""

    def __init__(self) -> None:
        """No rows yet."""
        self._size = (0, 0)
        self._held: dict[int, _Held] = {}
        self._running: dict[int, Sequence] = {}
        self._free: list[int] = []
        """In the order in which they are given away when nothing in them is wanted: the one left first, first."""

    def resize(self, rows: int, length: int) -> list[Copy]:
        """The cache is about to have so many rows of this length: what it has to copy before, and who gets which row.

        There must be a row for each that runs.
        """
        if (rows, length) == self._size:
            return []
        gone = [row for row in self._running if row >= rows]
        self._free = [row for row in self._free if row < rows]
        copies = [self._move(row) for row in gone]
        self._free[:0] = range(self._size[0], rows)
        self._held = {
            row: replace(held, known=min(held.known, length))
            for row, held in self._held.items()
            if row < rows
        }
        self._size = rows, length
        return copies

    def join(self, sequence: Sequence) -> Copy | None:
        """A sequence gets a row: what to copy there. The source is the row itself where it holds that already.

        Its last token is always computed, because its logits are wanted.
        """
        request = sequence.request
        scope = (request.adapter, request.queue)
        tokens = np.array(request.tokens, dtype=np.int32)
        source, length = self._longest(scope, tokens[:-1])
        row = source if source in self._free else self._free[0]
        self._free.remove(row)
        self._running[row] = sequence
        sequence.row = row
        self._held[row] = _Held(scope, tokens, length)
        return None if source is None else Copy(source, row, length)

    def hold(self, sequence: Sequence) -> None:
        """Its prompt has entered and its numbers are finite. Of its newest token nothing was computed yet."""
        held = self._held.get(sequence.row)
        if held is not None:
            tokens = np.append(held.tokens, np.array(sequence.generated[:-1], dtype=np.int32))
            self._held[sequence.row] = replace(held, tokens=tokens, known=len(tokens))

    def leave(self, sequence: Sequence) -> None:
        """It has ended; others may get its row."""
        del self._running[sequence.row]
        if sequence.row in self._held:
            self._free.append(sequence.row)
        else:
            self._free.insert(0, sequence.row)

    def forget_row(self, row: int) -> None:
        """It was cleared."""
        self._held.pop(row, None)

    def forget_adapter(self, adapter: str) -> None:
        """Its name may stand for another one soon."""
        for row in [row for row, held in self._held.items() if held.scope[0] == adapter]:
            del self._held[row]

    def _move(self, row: int) -> Copy:
        sequence = self._running.pop(row)
        sequence.row = self._free.pop(0)
        self._running[sequence.row] = sequence
        self._held.pop(sequence.row, None)
        if row in self._held:
            self._held[sequence.row] = self._held.pop(row)
        return Copy(row, sequence.row, sequence.cached + len(sequence.generated))

    def _longest(self, scope: Scope, wanted: NDArray[np.int32]) -> tuple[int | None, int]:
        """The row that begins with most of the wanted tokens, and how many; of alike ones a free one, left first."""
        source, best = None, MINIMUM - 1
        for row in (*self._free, *self._running):
            held = self._held.get(row)
            if held is None or held.scope != scope or min(held.known, len(wanted)) <= best:
                continue
            if held.tokens[best] == wanted[best]:  # else it is no longer than the best
                length = _common(held.tokens[: held.known], wanted)
                if length > best:
                    source, best = row, length
        return source, 0 if source is None else best


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """How many tokens from the start are the same."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    place = int(differs.argmax())
    return place if differs[place] else length
