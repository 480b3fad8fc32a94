"""Runs a batch of rows of different lengths without computing on padding.

Tokens pass through the model as one long row, each with its position in its own row; only attention sees
the padded rectangle, in which rows cannot look at each other. In random order that saves a quarter of
the tokens. (Sorting rows by length saves as much but makes batches of alike examples: on the ICD-10-CM
rows the loss after a short training was a quarter to a half higher.) Next: `tuneship/training/learner.py`.
"""

from itertools import count
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from tuneship.training.batches import Indices, PaddedBatch, collate
from tuneship.training.tokenized_examples import TokenizedExamples

# transformers knows attention functions by name: each model in training has its own.
NUMBERS = count()
KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# Rows of the trial: one in which the other would show through if packing let it.
PROBE_LENGTHS = (13, 4)


class PackedAttention:
    """An attention function of transformers that undoes the packing around `sdpa`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Make `model` use it. See `of`."""
        name = f"tuneship_packed_{next(NUMBERS)}"
        AttentionInterface.register(name, self)
        model.set_attn_implementation(name)
        self._windowed = bool(getattr(model.config, "sliding_window", None))
        self._shape = (0, 0)
        self._filled: Tensor | None = None
        """Where the tokens stand in the rectangle; None while batches go in as rectangles."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """Packing for `model`, or None where it would not compute the same; tried with two short rows.

        What differs: models without the attention interface, with positions inside of attention (ALiBi), with sinks,
        chunks or recurrent layers. Those read padded rectangles by their own attention.
        """
        layers = set(getattr(model.config, "layer_types", None) or [])
        if not (model._supports_attention_backend and layers <= KNOWN_LAYERS):  # noqa: SLF001 (no public way to ask)
            return None
        own = model.config._attn_implementation  # noqa: SLF001
        with torch.inference_mode():
            expected = _logits_of_rows(model)
            packing = cls(model)
            try:
                actual = packing._trial(model)
            except Exception:  # noqa: BLE001 (whatever an unknown architecture stumbles over)
                actual = torch.full_like(expected, torch.nan)
        tolerance = (1e-3 if model.dtype is torch.float32 else 0.1) * float(expected.std())
        if torch.allclose(actual, expected, rtol=0, atol=tolerance):
            return packing
        model.set_attn_implementation(own or "eager")
        return None

    def pack(self, batch: PaddedBatch, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
        """The model's input, shape (1, tokens), and where in it the places of `batch` are."""
        self._shape = batch.tokens.shape
        self._filled = torch.from_numpy(batch.filled).to(device)
        tokens = torch.from_numpy(batch.tokens.ravel()[batch.filled]).to(device)
        positions = self._filled % batch.tokens.shape[1]
        places = torch.from_numpy(np.searchsorted(batch.filled, batch.places)).to(device)
        return {"input_ids": tokens.unsqueeze(0), "position_ids": positions.unsqueeze(0)}, places

    def pause(self) -> None:
        """The next batch goes in as a rectangle."""
        self._filled = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Shapes (1, heads, tokens, size) in, (1, tokens, heads, size) out; or rectangles, untouched."""
        if self._windowed and "sliding_window" not in options:
            raise LookupError("the model has a window and does not tell its attention")
        if self._filled is None:
            return _attend(module, query, key, value, options), None
        query, key, value = (self._unpacked(states, self._filled) for states in (query, key, value))
        output = _attend(module, query, key, value, options)
        return output.flatten(0, 1).index_select(0, self._filled).unsqueeze(0), None

    def _unpacked(self, states: Tensor, filled: Tensor) -> Tensor:
        """(1, heads, tokens, size) to (rows, heads, width, size), zero where a row is over."""
        tokens = states[0].transpose(0, 1)
        rows, width = self._shape
        rectangle = tokens.new_zeros(rows * width, *tokens.shape[1:])
        rectangle.index_copy_(0, filled, tokens)
        return rectangle.view(rows, width, *tokens.shape[1:]).transpose(1, 2)

    def _trial(self, model: PreTrainedModel) -> Tensor:
        rows = _probe(model)
        inputs, _ = self.pack(collate(rows, np.arange(len(rows))), model.device)
        logits = model(**inputs, use_cache=False).logits[0].float()
        self.pause()
        return logits


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Tensor:
    """Causal attention over rectangles (rows, heads, width, size), within the layer's window; heads come third."""
    width = query.shape[2]
    window = options.get("sliding_window")
    mask = _window(width, window, query.device) if window and window < width else None
    if options.get("softcap"):
        return _attend_capped(module, query, key, value, mask, options)
    options["is_causal"] = True
    return sdpa_attention_forward(module, query, key, value, mask, **options)[0]


def _window(width: int, window: int, device: torch.device) -> Tensor:
    """True where a token (row) sees another (column): itself and the `window - 1` before it."""
    places = torch.arange(width, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window)


def _attend_capped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Gemma 2: scores are bent to stay within +-softcap, which no fused kernel of the CPU does."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / options["softcap"]))
    width = query.shape[2]
    visible = _window(width, width, query.device) if mask is None else mask
    scores = (scores * options["softcap"]).masked_fill(~visible, -torch.inf)
    shares = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    shares = functional.dropout(shares, options.get("dropout", 0.0), training=module.training)
    return (shares @ value).transpose(1, 2)


def _probe(model: PreTrainedModel) -> TokenizedExamples:
    tokens: Indices = np.arange(sum(PROBE_LENGTHS)) % model.config.get_text_config().vocab_size
    return TokenizedExamples(
        tokens.astype(np.int32), np.ones(len(tokens), np.bool_), np.cumsum([0, *PROBE_LENGTHS])
    )


def _logits_of_rows(model: PreTrainedModel) -> Tensor:
    """Each row of the probe alone, by the model's own attention."""
    rows = _probe(model)
    parts = torch.from_numpy(rows.tokens).long().to(model.device).split(PROBE_LENGTHS)
    logits = [model(input_ids=part.unsqueeze(0), use_cache=False).logits[0] for part in parts]
    return torch.cat(logits).float()
