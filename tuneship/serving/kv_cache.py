"""The KV cache: keys and values of all running sequences in one row each, to which `attention` is applied.

The number of rows (slots) grows by doubling, their length by a quarter (a step reads whole rows of keys, used or not),
both up to their limits; the engine frees it when it is idle. Holds no weights; `llama` and `generic` call `attend`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tuneship.serving.batch import FlatBatch
from tuneship.serving.kernels.layout import GROUP
from tuneship.serving.kv_slots import Copy
from tuneship.serving.models.attention import (
    AttentionPlan,
    DecodeIndices,
    attend_decode,
    attend_prefill,
)
from tuneship.serving.models.attention_masks import AttentionMasks


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Size and number format of the keys and values of one token."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class _CacheLayer(NamedTuple):
    """Storage of one layer, laid out so that decoding sequences attend by sums of matrix rows (`attend_decode`)."""

    # Dimensions: slot, head, dim, position.
    keys: Tensor
    # Dimensions: slot, head, position, dim.
    values: Tensor
    # View of the keys as [slot, position, head, dim].
    keys_by_position: Tensor
    # View of the values as [slot, position, head, dim].
    values_by_position: Tensor


class SlotCache:
    """Keys and values by layer, slot and position."""

    def __init__(
        self, shape: CacheShape, slots: int, length: int, tokens: int | None = None
    ) -> None:
        """Set the limits: number of slots, their length, and the product of both; memory is allocated when needed."""
        self.shape = shape
        self.slot_limit, self.length_limit = slots, length
        self.token_limit = slots * length if tokens is None else tokens
        self._size = (0, 0)
        self._layers = [self._allocate(0, 0) for _ in range(shape.layers)]
        # The newest indices, by slots, query heads and positions.
        self._indices: dict[tuple[tuple[int, ...], int, int], DecodeIndices] = {}
        self._masks = AttentionMasks(0, shape.dtype)

    @classmethod
    def of_one(cls, shape: CacheShape, length: int) -> "SlotCache":
        """A cache of a single slot, allocated at once."""
        cache = cls(shape, slots=1, length=length)
        cache.resize(1, length)
        return cache

    @property
    def bytes_allocated(self) -> int:
        """Size of the storage."""
        return self._size[0] * self._size[1] * self.shape.token_bytes

    def prepare(self) -> None:
        """Begin a step; the storage must be large enough for it."""
        self._masks.begin_step()

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys_values: Tensor,
        batch: FlatBatch,
        plan: AttentionPlan,
        decode: Callable[[tuple[Tensor, Tensor]], Tensor] | None = None,
    ) -> Tensor:
        """Store the keys and values of a batch, then attend causally over everything stored.

        queries [T, heads, dim], keys_values [T, 2 * kv heads, dim] -> [T, heads, dim]
        `decode` does both for the decoding sequences, given the keys and values of a layer, instead of torch.
        """
        stored = self._layers[layer]
        keys, values = keys_values.chunk(2, dim=1)
        left = slice(0 if decode is None else batch.decode_count, None)
        positions = batch.slots[left], batch.positions[left]
        if len(positions[0]):
            stored.keys_by_position.index_put_(positions, keys[left])
            stored.values_by_position.index_put_(positions, values[left])
        window = plan.window
        if window is not None and window >= batch.length:
            window = None

        outputs: list[Tensor] = []
        if batch.decode_count and decode is not None:
            outputs.append(decode((stored.keys, stored.values)))
        elif batch.decode_count:
            mask = self._masks.for_decode(batch, window)
            indices = self._decode_indices(batch.decode_slots, queries.shape[1], mask.shape[-1])
            outputs.append(
                attend_decode(
                    queries[: batch.decode_count], stored.keys, stored.values, indices, mask, plan
                )
            )
        for prefill in batch.prefills:
            mask = self._masks.for_prefill(prefill, window)
            part = slice(prefill.start, prefill.stop)
            known_keys, known_values = keys[part].transpose(0, 1), values[part].transpose(0, 1)
            if prefill.cached:
                stop = prefill.cached + prefill.stop - prefill.start
                # A copy in order: torch takes nearly twice as long with keys as they are stored.
                known_keys = stored.keys[prefill.slot, :, :, :stop].transpose(1, 2).contiguous()
                known_values = stored.values[prefill.slot, :, :stop]
            chunk = queries[part].transpose(0, 1)[None]
            output = attend_prefill(chunk, known_keys[None], known_values[None], mask, plan)
            outputs.append(output[0].transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def copy(self, copy: Copy) -> None:
        """Copy the beginning of a slot to another one."""
        source, target, length = copy
        for layer in self._layers:
            for view in (layer.keys_by_position, layer.values_by_position):
                view[target, :length] = view[source, :length]

    def clear(self, slot: int, start: int, stop: int) -> None:
        """Zero the positions [start, stop) of a slot: a mask hides small numbers, but neither infinity nor NaN."""
        if start < stop:
            for layer in self._layers:
                layer.keys[slot, :, :, start:stop].zero_()
                layer.values[slot, :, start:stop].zero_()

    def size_for(self, slots: int, length: int) -> tuple[int, int]:
        """Choose a number and length of slots with at least this size; keep the current ones if they suffice."""
        old_slots, old_length = self._size
        if slots <= old_slots and length <= old_length:
            return self._size
        size = (
            _grow(old_slots, slots, 2, self.slot_limit),
            _grow(old_length, length, 1.25, self.length_limit),
        )
        if size[0] * size[1] <= self.token_limit:
            return size
        # As long as these slots may be, so that it is not resized again for each token.
        return slots, min(self.length_limit, self.token_limit // slots)

    def resize(self, slots: int, length: int) -> None:
        """Change the size of the storage, dropping tokens beyond it."""
        if (slots, length) == self._size:
            return
        kept = slice(min(slots, self._size[0])), slice(min(length, self._size[1]))
        # Layer by layer, so that it is never in memory twice.
        for number, old in enumerate(self._layers):
            new = self._allocate(slots, length)
            new.keys_by_position[kept] = old.keys_by_position[kept]
            new.values_by_position[kept] = old.values_by_position[kept]
            self._layers[number] = new
        self._size = slots, length
        # Both depend on the size.
        self._indices, self._masks = {}, AttentionMasks(length, self.shape.dtype)

    def _allocate(self, slots: int, length: int) -> _CacheLayer:
        # Zeros, because an unwritten position that holds NaN would pass through a mask.
        heads, dim, dtype = self.shape.kv_heads, self.shape.head_dim, self.shape.dtype
        # Compiled kernels read a few keys beyond the last.
        numbers = slots * heads * dim * length
        keys = torch.zeros(numbers + GROUP, dtype=dtype)[:numbers].view(slots, heads, dim, length)
        values = torch.zeros(slots, heads, length, dim, dtype=dtype)
        return _CacheLayer(keys, values, keys.permute(0, 3, 1, 2), values.transpose(1, 2))

    def _decode_indices(self, slots: tuple[int, ...], heads: int, length: int) -> DecodeIndices:
        """The indices of one step, reused from the step before if they are the same."""
        key = slots, heads, length
        if key not in self._indices:
            dim, count, kv_heads = self.shape.head_dim, len(slots) * heads, self.shape.kv_heads
            read = torch.arange(kv_heads, dtype=torch.int32).repeat_interleave(heads // kv_heads)
            own = (torch.tensor(slots, dtype=torch.int32)[:, None] * kv_heads + read).view(-1, 1)
            indices = DecodeIndices(
                (own * dim + torch.arange(dim, dtype=torch.int32)).view(-1),
                torch.arange(0, count * dim, dim, dtype=torch.int32),
                (own * self._size[1] + torch.arange(length, dtype=torch.int32)).view(-1),
                torch.arange(0, count * length, length, dtype=torch.int32),
            )
            self._indices = {key: indices}
        return self._indices[key]


def _grow(present: int, needed: int, factor: float, limit: int) -> int:
    return present if needed <= present else min(limit, max(needed, int(factor * present)))
