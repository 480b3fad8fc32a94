"""Which sequences run in the next step: a first-come queue in front of a fixed number of rows.

Running sequences always fill rows 0..n-1, so that the cache and the batch are plain slices.
Knows nothing of tensors; `engine` acts on what it says.
"""

from collections import deque
from typing import NamedTuple

from tuneship.serving.sequence import Sequence


class Move(NamedTuple):
    """A sequence that changed rows: its cache has to follow."""

    source: int
    target: int
    length: int


class Scheduler:
    """Continuous batching: joiners enter at any step, the ended leave at once."""

    def __init__(self, rows: int, prompt_tokens: int) -> None:
        """`rows` run at once; `prompt_tokens` new ones enter per step, so that joiners do not stall the rest."""
        self.rows = rows
        self.prompt_tokens = prompt_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def idle(self) -> bool:
        """Nothing to run."""
        return not (self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue behind everyone who came before."""
        self.waiting.append(sequence)

    def schedule(self) -> int:
        """Let waiting sequences join behind the running ones; returns how many did.

        A prompt above the budget joins alone. Joiners of one adapter stand side by side, which makes fewer, larger
        matrix products of their prompts.
        """
        joiners: list[Sequence] = []
        budget = self.prompt_tokens
        while self.waiting and len(self.running) + len(joiners) < self.rows:
            budget -= self.waiting[0].length
            if budget < 0 and joiners:
                break
            joiners.append(self.waiting.popleft())
        joiners.sort(key=lambda sequence: sequence.request.adapter or "")
        for sequence in joiners:
            sequence.row = len(self.running)
            self.running.append(sequence)
        return len(joiners)

    def release(self, sequence: Sequence) -> Move | None:
        """Free the row of a running sequence; the last row moves into the gap."""
        last = self.running.pop()
        if last is sequence:
            return None
        move = Move(last.row, sequence.row, last.length)
        self.running[sequence.row] = last
        last.row = sequence.row
        return move
