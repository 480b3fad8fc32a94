"""The attention itself: queries, keys and values in, outputs out; one function for prompts, one for single tokens.

Keeps nothing between two calls; `kv_cache` stores keys and values and calls it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from tuneship.serving.models.attention_masks import hidden_positions
from tuneship.serving.models.gather_sum import weighted_sums


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The kind of attention of a layer."""

    scale: float
    # Number of tokens it looks back, the token itself included; None: all.
    window: int | None = None
    # Bound that scores approach smoothly (soft-capping); None: no bound.
    softcap: float | None = None


class DecodeIndices(NamedTuple):
    """For each decoding sequence and query head, the rows of a layer's storage that `weighted_sums` adds up."""

    keys: Tensor
    key_starts: Tensor
    values: Tensor
    value_starts: Tensor


def attend_prefill(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, plan: AttentionPlan
) -> Tensor:
    """Attend from a chunk [1, heads, L, dim] to its prompt so far [1, kv heads, M, dim]; causal without a mask."""
    if plan.softcap is None:
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=plan.scale,
            enable_gqa=True,
        )
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (keys, values))
    scores = _softcapped((queries @ keys.transpose(2, 3)) * plan.scale, plan)
    if mask is None:
        hidden = hidden_positions(torch.arange(scores.shape[2])[:, None], scores.shape[3], None)
        scores = scores.masked_fill(hidden, float("-inf"))
    else:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def attend_decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    indices: DecodeIndices,
    mask: Tensor,
    plan: AttentionPlan,
) -> Tensor:
    """Attend from one query token per decoding sequence: [sequences, heads, dim] -> the same.

    keys [slot, kv head, dim, position], values [slot, kv head, position, dim].

    Scores are sums of key rows weighted by the query, outputs are sums of value rows weighted by the scores. Every
    number is read once, in the order in which it lies in memory. Matrix products of so few queries with the keys of
    one slot are too small for a library: this is 2 to 3 times as fast as torch's own attention.
    """
    sequences, heads, dim = queries.shape
    weights = (queries * plan.scale).reshape(-1)
    scores = weighted_sums(keys, indices.keys, indices.key_starts, weights)
    scores = scores.view(sequences, heads, -1)[:, :, : mask.shape[-1]]
    weights = (_softcapped(scores, plan) + mask).softmax(-1).view(-1)
    outputs = weighted_sums(values, indices.values, indices.value_starts, weights)
    return outputs.view(sequences, heads, dim)


def _softcapped(scores: Tensor, plan: AttentionPlan) -> Tensor:
    return scores if plan.softcap is None else torch.tanh(scores / plan.softcap) * plan.softcap
