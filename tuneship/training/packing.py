"""Runs a batch of rows of different lengths without computing on padding.

Tokens pass through the model as one long row, each with its position in its own row; only attention sees
the padded rectangle, in which rows cannot look at each other. In random order that saves a quarter of
the tokens. (Sorting rows by length saves as much but makes batches of alike examples: on the ICD-10-CM
rows the loss after a short training was a quarter to a half higher.) Next: `tuneship/training/learner.py`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tuneship.training.batches import Batch

NAME = "tuneship_packed"


class PackedAttention:
    """An attention function of transformers that undoes the packing around `sdpa`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Make `model` use it; one model at a time in a process."""
        AttentionInterface.register(NAME, self)
        model.set_attn_implementation(NAME)
        self._shape = (0, 0)
        self._filled: Tensor | None = None
        """Where the tokens stand in the rectangle; None while batches go in as rectangles."""

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model calls registered attention functions and each token sees all before it."""
        config = model.config
        windows = getattr(config, "sliding_window", None) or any(
            kind != "full_attention" for kind in getattr(config, "layer_types", None) or []
        )
        return bool(model._supports_attention_backend) and not windows  # noqa: SLF001 (no public way to ask)

    def pack(self, batch: Batch, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
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
        options["is_causal"] = True
        if self._filled is None:
            return sdpa_attention_forward(module, query, key, value, None, **options)
        query, key, value = (self._unpacked(states, self._filled) for states in (query, key, value))
        output, _ = sdpa_attention_forward(module, query, key, value, None, **options)
        return output.flatten(0, 1).index_select(0, self._filled).unsqueeze(0), None

    def _unpacked(self, states: Tensor, filled: Tensor) -> Tensor:
        """(1, heads, tokens, size) to (rows, heads, width, size), zero where a row is over."""
        tokens = states[0].transpose(0, 1)
        rows, width = self._shape
        rectangle = tokens.new_zeros(rows * width, *tokens.shape[1:])
        rectangle.index_copy_(0, filled, tokens)
        return rectangle.view(rows, width, *tokens.shape[1:]).transpose(1, 2)
