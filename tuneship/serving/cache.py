"""Keys and values of all running sequences: one row each, and the attention over them.

Rows and length grow by doubling up to their limits. Knows no weights; `llama` and `generic` call `attend`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from tuneship.serving.batch import Batch
from tuneship.serving.scheduler import Move


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps per token."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class SlotCache:
    """Storage [layer, row, position, key|value, head, dim]."""

    def __init__(self, shape: CacheShape, rows: int, length: int) -> None:
        """Nothing is allocated before it is needed; `rows` and `length` are the limits."""
        self.shape = shape
        self.row_limit, self.length_limit = rows, length
        self._storage = self._allocate(rows=0, length=0)
        self._layers: list[Tensor] = []
        self._index = self._mask = torch.empty(0)

    @property
    def bytes_allocated(self) -> int:
        """Size of the storage."""
        return self._storage.numel() * self._storage.element_size()

    def prepare(self, batch: Batch) -> None:
        """Once per step: make room, find the places to write, build the mask of the decoding rows."""
        rows = batch.decoding + len(batch.prompts)
        self._reserve(rows, batch.length)
        self._index = batch.rows * self._storage.shape[2] + batch.positions
        decoding = batch.positions[: batch.decoding]
        length = int(decoding.max()) + 1 if batch.decoding else 0
        future = torch.arange(length) > decoding[:, None]
        mask = torch.zeros(future.shape, dtype=self.shape.dtype).masked_fill_(future, float("-inf"))
        self._mask = mask[:, None, None, :]

    def attend(
        self, layer: int, queries: Tensor, keys_values: Tensor, batch: Batch, scale: float
    ) -> Tensor:
        """Store the keys and values, then attend to all that came before.

        queries [T, heads, dim], keys_values [T, 2 * kv heads, dim] -> [T, heads, dim]
        """
        self._layers[layer].index_copy_(0, self._index, keys_values)
        parts: list[Tensor] = []
        if batch.decoding:
            parts.append(self._attend_cached(layer, queries[: batch.decoding], scale))
        parts.extend(
            _attend_prompt(queries[start:stop], keys_values[start:stop], scale)
            for start, stop in batch.prompts
        )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def move(self, move: Move) -> None:
        """A sequence changed rows."""
        kept = self._storage[:, :, : move.length]
        kept[:, move.target] = kept[:, move.source]

    def clear(self, row: int) -> None:
        """Forget values that are not finite: a mask hides numbers, but not NaN."""
        self._storage[:, row].zero_()

    def _attend_cached(self, layer: int, queries: Tensor, scale: float) -> Tensor:
        """One query token per row. The query heads that share a key head stand as a query length: no copies of keys."""
        rows, heads, dim = queries.shape
        length, groups = self._mask.shape[-1], heads // self.shape.kv_heads
        keys, values = self._storage[layer, :rows, :length].permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            queries.view(rows, self.shape.kv_heads, groups, dim),
            keys,
            values,
            attn_mask=self._mask.expand(rows, 1, groups, length),
            scale=scale,
        )
        return attended.reshape(rows, heads, dim)

    def _reserve(self, rows: int, length: int) -> None:
        _, old_rows, old_length = self._storage.shape[:3]
        if rows <= old_rows and length <= old_length:
            return
        grown = self._allocate(
            rows=_grow(old_rows, rows, self.row_limit),
            length=_grow(old_length, length, self.length_limit),
        )
        grown[:, :old_rows, :old_length] = self._storage
        self._storage = grown
        self._layers = [
            layer.view(-1, 2 * self.shape.kv_heads, self.shape.head_dim) for layer in grown
        ]

    def _allocate(self, rows: int, length: int) -> Tensor:
        """Zeros, since an unwritten position that holds NaN would pass through a mask."""
        shape = self.shape
        return torch.zeros(
            shape.layers, rows, length, 2, shape.kv_heads, shape.head_dim, dtype=shape.dtype
        )


def _grow(present: int, needed: int, limit: int) -> int:
    return present if needed <= present else min(limit, max(needed, 2 * present))


def _attend_prompt(queries: Tensor, keys_values: Tensor, scale: float) -> Tensor:
    """Causal attention within one prompt: [L, heads, dim]."""
    keys, values = keys_values.transpose(0, 1).chunk(2)
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys[None],
        values[None],
        is_causal=True,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
