"""Keys and values of all running sequences: one row each, and the attention over them.

Rows grow by doubling, the length by a quarter (a step reads whole key lines, used or not), both up to their limits, and
the engine gives back what stands idle. Knows no weights; `llama` and `generic` call `attend`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from tuneship.serving.batch import FlatBatch, Prompt
from tuneship.serving.gather_sum import weighted_sums
from tuneship.serving.kv_slots import Copy

# Generating rows attend to a multiple of so many positions: what a step looks up is then that of
# the step before.
_POSITIONS = 16


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps per token."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Of one token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a layer attends."""

    scale: float
    window: int | None = None
    """So many tokens back, itself included; None: all."""
    softcap: float | None = None
    """Scores are bent so that none goes beyond."""


class _CacheLayer(NamedTuple):
    """Storage of one layer, laid out so that generating rows attend by sums of whole lines (see `_attend_cached`)."""

    keys: Tensor
    """[row, head, dim, position]"""
    values: Tensor
    """[row, head, position, dim]"""
    key_places: Tensor
    value_places: Tensor
    """Views of both by [row, position, head, dim]."""


class _Lines(NamedTuple):
    """Which lines of a layer's storage are summed for each generating row and query head, as `weighted_sums` asks."""

    keys: Tensor
    key_starts: Tensor
    values: Tensor
    value_starts: Tensor


class SlotCache:
    """Keys and values by layer, row and position."""

    def __init__(
        self, shape: CacheShape, rows: int, length: int, tokens: int | None = None
    ) -> None:
        """Nothing is allocated before it is needed; `rows`, `length` and their product `tokens` are the limits."""
        self.shape = shape
        self.row_limit, self.length_limit = rows, length
        self.token_limit = rows * length if tokens is None else tokens
        self._size = (0, 0)
        self._layers = [self._allocate(0, 0) for _ in range(shape.layers)]
        self._lines: dict[tuple[tuple[int, ...], int, int], _Lines] = {}
        """The newest, by rows, query heads and positions."""
        self._edges: dict[int | None, Tensor] = {}
        """By window: see `_edge`."""
        self._masks: dict[int | None, Tensor] = {}
        """Of this step, by window."""
        self._prompt_masks: dict[tuple[Prompt, int | None], Tensor | None] = {}

    @property
    def bytes_allocated(self) -> int:
        """Size of the storage."""
        return self._size[0] * self._size[1] * self.shape.token_bytes

    def prepare(self) -> None:
        """Once per step, for which there is room."""
        self._masks.clear()
        self._prompt_masks.clear()

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys_values: Tensor,
        batch: FlatBatch,
        look: AttentionPlan,
    ) -> Tensor:
        """Store the keys and values, then attend to all that came before.

        queries [T, heads, dim], keys_values [T, 2 * kv heads, dim] -> [T, heads, dim]
        """
        stored = self._layers[layer]
        keys, values = keys_values.chunk(2, dim=1)
        places = batch.rows, batch.positions
        stored.key_places.index_put_(places, keys)
        stored.value_places.index_put_(places, values)
        window = look.window
        if window is not None and window >= batch.length:
            window = None
        parts: list[Tensor] = []
        if batch.decoding:
            mask = self._mask(batch, window)
            lines = self._lines_of(batch.generating, queries.shape[1], mask.shape[-1])
            asked = queries[: batch.decoding]
            parts.append(_attend_cached(stored, asked, lines, mask, look))
        for prompt in batch.prompts:
            mask = self._prompt_mask(prompt, window)
            part = slice(prompt.start, prompt.stop)
            known = keys[part].transpose(0, 1), values[part].transpose(0, 1)
            if prompt.cached:
                stop = prompt.cached + prompt.stop - prompt.start
                keys_so_far = stored.keys[prompt.row, :, :, :stop].transpose(1, 2)
                # In order: torch takes nearly twice as long with keys as they lie.
                known = keys_so_far.contiguous(), stored.values[prompt.row, :, :stop]
            parts.append(_attend_prompt(queries[part], *known, mask, look))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy(self, what: Copy) -> None:
        """Copy the beginning of a row to another one."""
        source, target, length = what
        for layer in self._layers:
            for places in (layer.key_places, layer.value_places):
                places[target, :length] = places[source, :length]

    def clear(self, row: int) -> None:
        """Forget values that are not finite: a mask hides numbers, but not NaN."""
        for layer in self._layers:
            layer.keys[row].zero_()
            layer.values[row].zero_()

    def _mask(self, batch: FlatBatch, window: int | None) -> Tensor:
        """[rows, 1, positions] for the generating rows."""
        if window not in self._masks:
            own = batch.positions[: batch.decoding]
            length = min(self._size[1], math.ceil((int(own.max()) + 1) / _POSITIONS) * _POSITIONS)
            masks = self._edge(window).index_select(0, self._size[1] - 1 - own)
            self._masks[window] = masks[:, None, :length]
        return self._masks[window]

    def _edge(self, window: int | None) -> Tensor:
        """The masks of all positions, the last one first: each is the one before it moved by one, so all are views."""
        if window not in self._edges:
            size = self._size[1]
            hidden = _hidden(torch.tensor([size - 1]), 2 * size - 1, window)
            self._edges[window] = self._additive(hidden).as_strided((size, size), (1, 1))
        return self._edges[window]

    def _prompt_mask(self, prompt: Prompt, window: int | None) -> Tensor | None:
        """[part, cached + part], or None where each token sees all before it in this part."""
        key = (prompt, window)
        if key not in self._prompt_masks:
            stop = prompt.cached + prompt.stop - prompt.start
            is_plain = not prompt.cached and (window is None or window >= stop)
            positions = torch.arange(prompt.cached, stop)[:, None]
            mask = None if is_plain else self._additive(_hidden(positions, stop, window))
            self._prompt_masks[key] = mask
        return self._prompt_masks[key]

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.shape.dtype)
        return mask.masked_fill_(hidden, float("-inf"))

    def _lines_of(self, rows: tuple[int, ...], heads: int, length: int) -> _Lines:
        key = rows, heads, length
        if key not in self._lines:
            dim, count, kv_heads = self.shape.head_dim, len(rows) * heads, self.shape.kv_heads
            read = torch.arange(kv_heads, dtype=torch.int32).repeat_interleave(heads // kv_heads)
            own = (torch.tensor(rows, dtype=torch.int32)[:, None] * kv_heads + read).view(-1, 1)
            lines = _Lines(
                (own * dim + torch.arange(dim, dtype=torch.int32)).view(-1),
                torch.arange(0, count * dim, dim, dtype=torch.int32),
                (own * self._size[1] + torch.arange(length, dtype=torch.int32)).view(-1),
                torch.arange(0, count * length, length, dtype=torch.int32),
            )
            self._lines = {key: lines}
        return self._lines[key]

    def size_for(self, rows: int, length: int) -> tuple[int, int]:
        """Rows and length of a storage that holds so many rows of so many tokens; the present one's if it does."""
        old_rows, old_length = self._size
        if rows <= old_rows and length <= old_length:
            return self._size
        size = (
            _grow(old_rows, rows, 2, self.row_limit),
            _grow(old_length, length, 1.25, self.length_limit),
        )
        if size[0] * size[1] <= self.token_limit:
            return size
        # All that these rows may have, so that it is not made again for each token.
        return rows, min(self.length_limit, self.token_limit // rows)

    def resize(self, rows: int, length: int) -> None:
        """Storage of another size; what lies beyond is gone."""
        if (rows, length) == self._size:
            return
        kept = slice(min(rows, self._size[0])), slice(min(length, self._size[1]))
        for number, old in enumerate(self._layers):  # one at a time: never twice the whole
            new = self._allocate(rows, length)
            new.key_places[kept] = old.key_places[kept]
            new.value_places[kept] = old.value_places[kept]
            self._layers[number] = new
        self._size = rows, length
        self._lines, self._edges = {}, {}  # both are of the old size

    def _allocate(self, rows: int, length: int) -> _CacheLayer:
        """Zeros, since an unwritten position that holds NaN would pass through a mask."""
        heads, dim, dtype = self.shape.kv_heads, self.shape.head_dim, self.shape.dtype
        keys = torch.zeros(rows, heads, dim, length, dtype=dtype)
        values = torch.zeros(rows, heads, length, dim, dtype=dtype)
        return _CacheLayer(keys, values, keys.permute(0, 3, 1, 2), values.transpose(1, 2))


def _grow(present: int, needed: int, factor: float, limit: int) -> int:
    return present if needed <= present else min(limit, max(needed, int(factor * present)))


def _hidden(positions: Tensor, length: int, window: int | None) -> Tensor:
    """Which of `length` tokens a token at each of the positions [n, 1] does not see: later ones, too early ones.

    Of one position [1] a single line.
    """
    others = torch.arange(length)
    hidden = others > positions
    return hidden if window is None else hidden | (others <= positions - window)


def _attend_prompt(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, look: AttentionPlan
) -> Tensor:
    """Attention of a part of a prompt [L, heads, dim] to the whole of it so far [kv heads, M, dim]."""
    asking = queries.transpose(0, 1)[None]
    return _attention(asking, keys[None], values[None], mask, look)[0].transpose(0, 1)


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, look: AttentionPlan
) -> Tensor:
    """[n, heads, L, dim] over [n, kv heads, M, dim]; without a mask it is causal."""
    if look.softcap is None:
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=look.scale,
            enable_gqa=True,
        )
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (one.repeat_interleave(groups, dim=1) for one in (keys, values))
    scores = _bent((queries @ keys.transpose(2, 3)) * look.scale, look)
    if mask is None:
        hidden = _hidden(torch.arange(scores.shape[2])[:, None], scores.shape[3], None)
        scores = scores.masked_fill(hidden, float("-inf"))
    else:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def _attend_cached(
    stored: _CacheLayer, queries: Tensor, lines: _Lines, mask: Tensor, look: AttentionPlan
) -> Tensor:
    """One query token per generating row: [rows, heads, dim] -> [rows, heads, dim].

    Scores are a sum of key lines, weighted by the query; the outcome is a sum of value lines, weighted by them.
    This reads every number once, in the order in which it lies, where products of two queries with a row's keys
    are too small for a library of products: 2 to 3 times as fast as torch's own attention.
    """
    rows, heads, dim = queries.shape
    asked = (queries * look.scale).reshape(-1)
    scores = weighted_sums(stored.keys, lines.keys, lines.key_starts, asked)
    scores = scores.view(rows, heads, -1)[:, :, : mask.shape[-1]]
    weights = (_bent(scores, look) + mask).softmax(-1).view(-1)
    found = weighted_sums(stored.values, lines.values, lines.value_starts, weights)
    return found.view(rows, heads, dim)


def _bent(scores: Tensor, look: AttentionPlan) -> Tensor:
    """As the look's softcap asks."""
    return scores if look.softcap is None else torch.tanh(scores / look.softcap) * look.softcap
