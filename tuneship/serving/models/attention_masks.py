"""The additive masks of the attention over the KV cache, each made once for all layers of a step.

Knows positions and windows, no keys and no values; `kv_cache` keeps the masks, `attention` adds them to its scores.
"""

import math

import torch
from torch import Tensor

from tuneship.serving.batch import FlatBatch, PrefillChunk

# Decoding sequences attend to a multiple of this many positions, so that most steps need the
# same indices as the step before.
POSITIONS_MULTIPLE = 16


class AttentionMasks:
    """Masks for slots of one length, by window (None: the whole sequence)."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        """Make no mask before it is needed."""
        self._length = length
        self._dtype = dtype
        # Masks [length, length] of all positions, the last position first.
        self._position_masks: dict[int | None, Tensor] = {}
        # Masks of this step.
        self._decode_masks: dict[int | None, Tensor] = {}
        # Masks of this step, by chunk and window.
        self._prefill_masks: dict[tuple[PrefillChunk, int | None], Tensor | None] = {}

    def begin_step(self) -> None:
        """Drop the masks of the step before."""
        self._decode_masks.clear()
        self._prefill_masks.clear()

    def for_decode(self, batch: FlatBatch, window: int | None) -> Tensor:
        """Return the mask [sequences, 1, positions] of the decoding sequences."""
        if window in self._decode_masks:
            return self._decode_masks[window]
        size = self._length
        if window not in self._position_masks:
            # The mask of each position is that of the next one shifted by one, so all are overlapping views of one
            # row: a square of this size would take more memory than the cache.
            hidden = hidden_positions(torch.tensor([size - 1]), 2 * size - 1, window)
            self._position_masks[window] = self._additive(hidden).as_strided((size, size), (1, 1))
        own = batch.positions[: batch.decode_count]
        needed = math.ceil((int(own.max()) + 1) / POSITIONS_MULTIPLE) * POSITIONS_MULTIPLE
        masks = self._position_masks[window].index_select(0, size - 1 - own)
        self._decode_masks[window] = masks[:, None, : min(size, needed)]
        return self._decode_masks[window]

    def for_prefill(self, prefill: PrefillChunk, window: int | None) -> Tensor | None:
        """Return the mask [chunk, cached + chunk]; None if a plain causal mask gives the same result."""
        key = (prefill, window)
        if key not in self._prefill_masks:
            stop = prefill.cached + prefill.stop - prefill.start
            is_causal = not prefill.cached and (window is None or window >= stop)
            positions = torch.arange(prefill.cached, stop)[:, None]
            mask = None if is_causal else self._additive(hidden_positions(positions, stop, window))
            self._prefill_masks[key] = mask
        return self._prefill_masks[key]

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype)
        return mask.masked_fill_(hidden, float("-inf"))


def hidden_positions(positions: Tensor, length: int, window: int | None) -> Tensor:
    """For a token at each position, which of `length` tokens are hidden: later ones, and those before its window.

    positions [n, 1] -> [n, length]; a single position [1] -> [length].
    """
    others = torch.arange(length)
    hidden = others > positions
    return hidden if window is None else hidden | (others <= positions - window)
