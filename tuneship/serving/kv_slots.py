"""Assigns slots of the KV cache to sequences, and finds cached prefixes for new prompts.

A slot keeps its keys and values after its sequence has ended, until another sequence gets it; so a prompt is given the
free slot that begins with most of its tokens. Only tokens whose logits were finite are registered here. Handles no
tensors; `engine` copies rows of the cache.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuneship.serving.sequence import Sequence

# A common prefix shorter than this is computed again: a copy would not pay.
MIN_PREFIX_TOKENS = 16

# Adapter, queue, and whether the prompt is a long one. Keys and values depend on the adapter and, in
# models with LongRoPE, on the length of the prompt. Prefixes are shared within a queue (a
# deployment) only, so that timing shows nobody which prompts another deployment was sent.
Scope = tuple[str | None, str, bool]


class Copy(NamedTuple):
    """A copy of the first `length` tokens of one row of the KV cache to another one."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class _CachedTokens:
    """The tokens of the sequence that is or was in a slot."""

    scope: Scope
    tokens: NDArray[np.int32]
    # Number of them whose keys and values are in the cache.
    valid: int


class KvSlots:
    """The slots of the KV cache: the sequence that runs in each, and the tokens that free ones still hold."""

    def __init__(self, short_tokens: int | None = None) -> None:
        """Begin without slots; `resize` makes them. `short_tokens`: see `ModelFacts.short_tokens`."""
        self._short_tokens = short_tokens
        self._size = (0, 0)
        self._cached: dict[int, _CachedTokens] = {}
        self._running: dict[int, Sequence] = {}
        # Free slots, least recently used first: that is the order in which they are given away.
        self._free: list[int] = []
        # Number of tokens up to which earlier sequences have written in a slot.
        self._left: dict[int, int] = {}

    def resize(self, slots: int, length: int) -> list[Copy]:
        """Change the number and the length of the slots, before the cache does; return the copies that it must make
        first.

        There must be a slot for each running sequence.
        """
        if (slots, length) == self._size:
            return []
        dropped = [slot for slot in self._running if slot >= slots]
        self._free = [slot for slot in self._free if slot < slots]
        copies: list[Copy] = []
        for slot in dropped:
            sequence = self._running.pop(slot)
            sequence.slot = self._free.pop(0)
            self._running[sequence.slot] = sequence
            self._cached.pop(sequence.slot, None)
            if slot in self._cached:
                self._cached[sequence.slot] = self._cached.pop(slot)
            length_used = sequence.cached + len(sequence.answered)
            copies.append(Copy(slot, sequence.slot, length_used))

        self._left = {slot: left for slot, left in self._left.items() if slot < slots}
        # New slots are given away before those that may hold a prefix.
        self._free[:0] = range(self._size[0], slots)
        self._cached = {
            slot: replace(cached, valid=min(cached.valid, length))
            for slot, cached in self._cached.items()
            if slot < slots
        }
        self._size = slots, length
        return copies

    def assign(self, sequence: Sequence) -> Copy | None:
        """Give a sequence a slot; return the cached prefix to copy there, perhaps from the slot itself."""
        request = sequence.request
        is_long = self._short_tokens is not None and len(sequence.prompt) > self._short_tokens
        scope = (request.adapter, request.queue, is_long)
        tokens = np.array(sequence.prompt, dtype=np.int32)
        # The last token is always computed, because its logits are needed; those of a prompt that asks for its log
        # probabilities are all needed.
        reusable = tokens[:-1] if request.prompt_logprobs is None else tokens[:0]

        source, best = None, MIN_PREFIX_TOKENS - 1
        # Of equally good slots a free one is taken, and of those the least recently used.
        for known in (*self._free, *self._running):
            cached = self._cached.get(known)
            if cached is None or cached.scope != scope:
                continue
            # One comparison rules out most slots: those that differ here are no better.
            length = min(cached.valid, len(reusable))
            if length <= best or cached.tokens[best] != reusable[best]:
                continue
            differs = cached.tokens[:length] != reusable[:length]
            first = int(differs.argmax())
            common = first if differs[first] else length
            if common > best:
                source, best = known, common

        slot = source if source in self._free else self._free[0]
        self._free.remove(slot)
        self._running[slot] = sequence
        sequence.slot = slot
        self._cached[slot] = _CachedTokens(scope, tokens, 0 if source is None else best)
        return None if source is None else Copy(source, slot, best)

    def register(self, sequence: Sequence) -> None:
        """Make the tokens of a prefilled sequence with finite logits available to others."""
        cached = self._cached.get(sequence.slot)
        if cached is not None:
            # Keys and values of the newest token come with the next step.
            tokens = np.append(cached.tokens, np.array(sequence.answered[:-1], dtype=np.int32))
            self._cached[sequence.slot] = replace(cached, tokens=tokens, valid=len(tokens))

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that has ended; its prefix stays available."""
        del self._running[sequence.slot]
        self._left[sequence.slot] = max(sequence.length, self._left.get(sequence.slot, 0))
        if sequence.slot in self._cached:
            self._free.append(sequence.slot)
        else:
            self._free.insert(0, sequence.slot)

    def take_left(self, slot: int) -> int:
        """Number of tokens up to which earlier sequences have written in a slot, for the caller to clear."""
        return self._left.pop(slot, 0)

    def invalidate(self, slot: int) -> None:
        """Forget the tokens of a slot, since their keys and values may not be finite."""
        self._cached.pop(slot, None)

    def invalidate_adapter(self, adapter: str) -> None:
        """Forget all tokens of an adapter, because its name may soon belong to another one."""
        for slot in [slot for slot, cached in self._cached.items() if cached.scope[0] == adapter]:
            del self._cached[slot]
