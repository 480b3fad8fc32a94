"""Keys and values of all running sequences: one row each, and the attention over them.

Rows and length grow by doubling up to their limits, and what stands idle is given back. Knows no weights; `llama` and
`generic` call `attend`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from tuneship.serving.batch import Batch, Prompt
from tuneship.serving.scheduler import Move

KEPT_BYTES = 16 << 20
"""Storage up to this size stays when nobody uses it: to ask for it again would cost each lone request."""


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
class Look:
    """How a layer attends."""

    scale: float
    window: int | None = None
    """So many tokens back, itself included; None: all."""
    softcap: float | None = None
    """Scores are bent so that none goes beyond."""


class SlotCache:
    """Storage per layer [row, position, key|value, head, dim]."""

    def __init__(
        self, shape: CacheShape, rows: int, length: int, tokens: int | None = None
    ) -> None:
        """Nothing is allocated before it is needed; `rows`, `length` and their product `tokens` are the limits."""
        self.shape = shape
        self.row_limit, self.length_limit = rows, length
        self.token_limit = rows * length if tokens is None else tokens
        self._size = (0, 0)
        self._layers: list[Tensor] = []
        self._flat: list[Tensor] = []
        """The same as [row * position, key|value head, dim]."""
        self._index = torch.empty(0)
        self._masks: dict[int | None, Tensor] = {}
        self._prompt_masks: dict[tuple[Prompt, int | None], Tensor | None] = {}

    @property
    def bytes_allocated(self) -> int:
        """Size of the storage."""
        return self._size[0] * self._size[1] * self.shape.token_bytes

    def prepare(self, batch: Batch) -> None:
        """Once per step: make room, find the places to write."""
        self._reserve(batch.decoding + len(batch.prompts), batch.length)
        self._index = batch.rows * self._size[1] + batch.positions
        self._masks.clear()
        self._prompt_masks.clear()

    def attend(
        self, layer: int, queries: Tensor, keys_values: Tensor, batch: Batch, look: Look
    ) -> Tensor:
        """Store the keys and values, then attend to all that came before.

        queries [T, heads, dim], keys_values [T, 2 * kv heads, dim] -> [T, heads, dim]
        """
        self._flat[layer].index_copy_(0, self._index, keys_values)
        window = look.window
        if window is not None and window >= batch.length:
            window = None
        parts: list[Tensor] = []
        if batch.decoding:
            mask = self._mask(batch, window)
            parts.append(self._attend_cached(layer, queries[: batch.decoding], mask, look))
        for prompt in batch.prompts:
            mask = self._prompt_mask(prompt, window)
            known = keys_values[prompt.start : prompt.stop]
            if prompt.cached:
                stop = prompt.cached + prompt.stop - prompt.start
                known = self._layers[layer][prompt.row, :stop].flatten(1, 2)
            asking = queries[prompt.start : prompt.stop]
            parts.append(_attend_prompt(asking, known, mask, look))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def move(self, move: Move) -> None:
        """A sequence changed rows."""
        for layer in self._layers:
            layer[move.target, : move.length] = layer[move.source, : move.length]

    def clear(self, row: int) -> None:
        """Forget values that are not finite: a mask hides numbers, but not NaN."""
        for layer in self._layers:
            layer[row].zero_()

    def rest(self) -> None:
        """Nothing runs: give back what is more than a little."""
        if self.bytes_allocated > KEPT_BYTES:
            self._size, self._layers, self._flat = (0, 0), [], []

    def _mask(self, batch: Batch, window: int | None) -> Tensor:
        """[rows, 1, 1, length] for the generating rows."""
        if window not in self._masks:
            positions = batch.positions[: batch.decoding, None]
            hidden = _hidden(positions, int(positions.max()) + 1, window)
            self._masks[window] = self._additive(hidden)[:, None, None, :]
        return self._masks[window]

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

    def _attend_cached(self, layer: int, queries: Tensor, mask: Tensor, look: Look) -> Tensor:
        """One query token per row. The query heads that share a key head stand as a query length: no copies of keys."""
        rows, heads, dim = queries.shape
        length, groups = mask.shape[-1], heads // self.shape.kv_heads
        keys, values = self._layers[layer][:rows, :length].permute(2, 0, 3, 1, 4)
        grouped = queries.view(rows, self.shape.kv_heads, groups, dim)
        attended = _attention(grouped, keys, values, mask.expand(rows, 1, groups, length), look)
        return attended.reshape(rows, heads, dim)

    def _reserve(self, rows: int, length: int) -> None:
        old_rows, old_length = self._size
        if rows <= old_rows and length <= old_length:
            return
        size = (
            _grow(old_rows, rows, self.row_limit),
            _grow(old_length, length, self.length_limit),
        )
        if size[0] * size[1] > self.token_limit:
            # All that these rows may have, so that it is not made anew for each token.
            size = (rows, min(self.length_limit, self.token_limit // rows))
        kept_rows, kept_length = min(old_rows, size[0]), min(old_length, size[1])
        for number in range(self.shape.layers):  # one at a time: never twice the whole
            grown = self._allocate(*size)
            if old_rows:
                old = self._layers[number]
                grown[:kept_rows, :kept_length] = old[:kept_rows, :kept_length]
                self._layers[number] = grown
            else:
                self._layers.append(grown)
        self._size = size
        heads, dim = 2 * self.shape.kv_heads, self.shape.head_dim
        self._flat = [layer.view(-1, heads, dim) for layer in self._layers]

    def _allocate(self, rows: int, length: int) -> Tensor:
        """Zeros, since an unwritten position that holds NaN would pass through a mask."""
        shape = self.shape
        return torch.zeros(rows, length, 2, shape.kv_heads, shape.head_dim, dtype=shape.dtype)


def _grow(present: int, needed: int, limit: int) -> int:
    return present if needed <= present else min(limit, max(needed, 2 * present))


def _hidden(positions: Tensor, length: int, window: int | None) -> Tensor:
    """Which of `length` tokens a token at each of the positions [n, 1] does not see: later ones, too early ones."""
    others = torch.arange(length)
    hidden = others > positions
    return hidden if window is None else hidden | (others <= positions - window)


def _attend_prompt(queries: Tensor, keys_values: Tensor, mask: Tensor | None, look: Look) -> Tensor:
    """Attention of a part of a prompt [L, heads, dim] to the whole of it so far [M, 2 * kv heads, dim]."""
    keys, values = keys_values.transpose(0, 1)[None].chunk(2, dim=1)
    return _attention(queries.transpose(0, 1)[None], keys, values, mask, look)[0].transpose(0, 1)


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, look: Look
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
    scores = (queries @ keys.transpose(2, 3)) * look.scale
    scores = torch.tanh(scores / look.softcap) * look.softcap
    if mask is None:
        hidden = _hidden(torch.arange(scores.shape[2])[:, None], scores.shape[3], None)
        scores = scores.masked_fill(hidden, float("-inf"))
    else:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
