"""Runs a batch of rows of different lengths without computing on padding (packing).

Tokens pass through the model as one long row, each with its position in its own row; only attention sees the padded
rectangle, in which rows cannot attend to each other. With rows in random order this saves a quarter of the tokens.
Sorting rows by length would save as much but makes batches of similar examples: on the ICD-10-CM rows the loss after a
short training was a quarter to a half higher. Next: `learner.py`.
"""

from itertools import count
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from tuneship.training.examples.batches import PaddedBatch, collate
from tuneship.training.examples.tokenized_examples import TokenizedExamples

# transformers finds attention functions by name: each model in training registers one of its own.
MODEL_NUMBERS = count()
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
# torch's fused attention in bfloat16 on CPU takes four times as long on rows of 75 tokens, 1.5 times on rows of 512.
SHORT_ROW_TOKENS = 512
# Two rows are enough to see whether one can attend to the other.
PROBE_LENGTHS_TOKENS = (13, 4)


class PackedAttention:
    """An attention function of transformers that undoes the packing around `sdpa`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Register as the attention of `model`. Callers use `for_model`, which checks that it computes the same."""
        name = f"tuneship_packed_{next(MODEL_NUMBERS)}"
        AttentionInterface.register(name, self)
        model.set_attn_implementation(name)
        self._has_window = bool(getattr(model.config, "sliding_window", None))
        self._shape = (0, 0)
        # Positions of the tokens in the padded rectangle; None while batches go in as rectangles.
        self._token_positions: Tensor | None = None

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> Self | None:
        """Packing for `model`; None if a trial with two short rows shows that it would not compute the same.

        Models compute something else without the attention interface, with positions inside of attention (ALiBi), with
        attention sinks, with chunks or with recurrent layers. Those read padded rectangles by their own attention.
        """
        layers = set(getattr(model.config, "layer_types", None) or [])
        if not (model._supports_attention_backend and layers <= PACKABLE_LAYERS):  # noqa: SLF001 (no public way to ask)
            return None
        own_attention = model.config._attn_implementation  # noqa: SLF001
        tokens = np.arange(sum(PROBE_LENGTHS_TOKENS)) % model.config.get_text_config().vocab_size
        rows = TokenizedExamples(
            tokens.astype(np.int32),
            np.ones(len(tokens), np.bool_),
            np.cumsum([0, *PROBE_LENGTHS_TOKENS]),
        )
        with torch.inference_mode():
            # Each row alone, by the model's own attention.
            alone = torch.from_numpy(rows.tokens).long().to(model.device)
            expected = torch.cat(
                [
                    model(input_ids=row.unsqueeze(0), use_cache=False).logits[0]
                    for row in alone.split(PROBE_LENGTHS_TOKENS)
                ]
            ).float()
            packing = cls(model)
            try:
                inputs, _ = packing.pack(collate(rows, rows.all_indices), model.device)
                actual = model(**inputs, use_cache=False).logits[0].float()
            except Exception:  # noqa: BLE001 (an unknown architecture may raise anything here)
                actual = torch.full_like(expected, torch.nan)
            packing.disable()
        tolerance = (1e-3 if model.dtype is torch.float32 else 0.1) * float(expected.std())
        if torch.allclose(actual, expected, rtol=0, atol=tolerance):
            return packing
        model.set_attn_implementation(own_attention or "eager")
        return None

    def pack(self, batch: PaddedBatch, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
        """The model's input, shape (1, tokens), and where in it the `logit_positions` of `batch` are."""
        self._shape = batch.tokens.shape
        self._token_positions = torch.from_numpy(batch.token_positions).to(device)
        tokens = torch.from_numpy(batch.tokens.ravel()[batch.token_positions]).to(device)
        positions_in_row = self._token_positions % batch.tokens.shape[1]
        packed = np.searchsorted(batch.token_positions, batch.logit_positions)
        inputs = {"input_ids": tokens.unsqueeze(0), "position_ids": positions_in_row.unsqueeze(0)}
        return inputs, torch.from_numpy(packed).to(device)

    def disable(self) -> None:
        """Let batches go in as rectangles until the next `pack`."""
        self._token_positions = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention over packed rows: shapes (1, heads, tokens, size) in, (1, tokens, heads, size) out.

        While packing is disabled, rectangles in and out.
        """
        if self._has_window and "sliding_window" not in options:
            raise LookupError(
                "the model has a sliding window and does not pass it to its attention"
            )
        positions = self._token_positions
        if positions is None:
            return _attend(module, query, key, value, options), None
        query, key, value = (self._unpack(states, positions) for states in (query, key, value))
        output = _attend(module, query, key, value, options)
        return output.flatten(0, 1).index_select(0, positions).unsqueeze(0), None

    def _unpack(self, states: Tensor, positions: Tensor) -> Tensor:
        """(1, heads, tokens, size) to (rows, heads, width, size), zero at padding."""
        tokens = states[0].transpose(0, 1)
        rows, width = self._shape
        rectangle = tokens.new_zeros(rows * width, *tokens.shape[1:])
        rectangle.index_copy_(0, positions, tokens)
        return rectangle.view(rows, width, *tokens.shape[1:]).transpose(1, 2)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Tensor:
    """Causal attention within the layer's window: (rows, heads, width, size) in, (rows, width, heads, size) out."""
    width = query.shape[2]
    window = options.get("sliding_window")
    mask = _window_mask(width, window, query.device) if window and window < width else None
    if options.get("softcap"):
        return _softcapped_attention(module, query, key, value, mask, options)
    is_learnt = torch.is_grad_enabled() and not (module.training and options.get("dropout"))
    is_on_cpu = query.device.type == "cpu"
    takes_long = is_on_cpu and query.dtype is torch.bfloat16 and width <= SHORT_ROW_TOKENS
    if is_learnt and mask is None and takes_long:
        scaling = options.get("scaling") or query.shape[-1] ** -0.5
        return ShortRows.apply(query, key, value, scaling).transpose(1, 2)
    options["is_causal"] = True
    return sdpa_attention_forward(module, query, key, value, mask, **options)[0]


class ShortRows(torch.autograd.Function):
    """Causal attention that recomputes its weights in the backward pass instead of keeping them.

    The heads that share a key are rows of one product, so keys and values are not repeated.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        rows, _, width, size = query.shape
        grouped = query.reshape(rows, key.shape[1], -1, size)
        ctx.save_for_backward(grouped, key, value)
        ctx.width, ctx.scaling = width, scaling
        weights = _causal_weights(grouped, key, width, scaling)
        return (weights @ value).view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grad = grads[0].reshape(query.shape)
        weights = _causal_weights(query, key, ctx.width, ctx.scaling)
        grad_weights = grad @ value.mT
        softmax_backward = torch.ops.aten._softmax_backward_data  # noqa: SLF001 (what autograd calls)
        grad_scores = softmax_backward(grad_weights, weights, -1, weights.dtype)
        grad_scores *= ctx.scaling
        grad_query = (grad_scores @ key).view(grads[0].shape)
        return grad_query, grad_scores.mT @ query, weights.mT @ grad, None


def _causal_weights(grouped: Tensor, key: Tensor, width: int, scaling: float) -> Tensor:
    """Return attention weights, shape (rows, heads of keys, queries of all heads that share a key, width)."""
    scores = (grouped @ key.mT).mul_(scaling)
    # Minus infinity after each token, else 0: no query sees the tokens that follow its own.
    future = torch.full((width, width), -torch.inf, dtype=key.dtype, device=key.device).triu(1)
    scores += future.repeat(grouped.shape[2] // width, 1)
    return functional.softmax(scores, dim=-1)


def _window_mask(width: int, window: int, device: torch.device) -> Tensor:
    """True where a token (row) attends to another (column): itself and the `window - 1` before it."""
    positions = torch.arange(width, device=device)
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance < window)


def _softcapped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention of Gemma 2, with scores limited to +-softcap; no fused CPU kernel does that."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / options["softcap"]))
    width = query.shape[2]
    visible = _window_mask(width, width, query.device) if mask is None else mask
    scores = (scores * options["softcap"]).masked_fill(~visible, -torch.inf)
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, options.get("dropout", 0.0), training=module.training)
    return (weights @ value).transpose(1, 2)
