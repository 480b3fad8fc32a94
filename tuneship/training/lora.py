"""peft's LoRA layer with a quicker way through it on CPU; the files it saves are peft's own.

The same sum as `peft.tuners.lora.Linear` up to rounding. On small models half of a peft step is
bookkeeping: a third is drawing dropout masks (torch draws them one number at a time), the rest
passes over memory for scaling and adding. Here a mask costs 16 random bits a number, drawn in bulk,
and one autograd function keeps what its backward needs. Next: `tuneship/training/learner.py`.
"""

from typing import Any, cast

import numpy as np
import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn import functional

# Dropout is rounded to this many steps.
RANDOM_VALUES = 1 << 16


class Noise:
    """Random bits for dropout. A function of (seed, step, rank) alone, so that resuming needs no state."""

    def __init__(self, seed: int, rank: int = 0) -> None:
        """Of step 0 until `begin_step`."""
        self._seed = seed
        self._rank = [rank] if rank else []  # a job's first process draws what its only one would
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Start the bits of a step over."""
        self._bits = np.random.SFC64(np.random.SeedSequence([self._seed, step, *self._rank]))

    def kept(self, like: Tensor, dropout: float) -> Tensor:
        """A mask in the shape and type of `like`: 0 with probability `dropout`, else 1."""
        count = like.numel()
        draws = self._bits.random_raw(-(-count // 4)).view(np.int16)[:count]
        lowest = round(dropout * RANDOM_VALUES) - RANDOM_VALUES // 2
        return (torch.from_numpy(draws) >= lowest).view(like.shape).to(like.dtype)


class FusedLinear(Linear):
    """One adapter on a linear layer, without merging, mixing or variants (what training needs)."""

    noise: Noise
    """Set once after the layer is made; shared by all layers."""

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """Shape (..., in) to (..., out)."""
        name = self.active_adapters[0]
        # The adapter is float32 whatever the base model is: small steps would be lost in bfloat16.
        a = cast("Tensor", self.lora_A[name].weight).to(x.dtype)
        b = cast("Tensor", self.lora_B[name].weight).to(x.dtype)
        scaling = self.scaling[name]
        layer = cast("nn.Linear", self.get_base_layer())
        if not self.training:
            return _added(x, layer, a, b * scaling)
        dropout = getattr(self.lora_dropout[name], "p", 0.0)
        kept = self.noise.kept(x, dropout) if dropout else None
        y = _AddLora.apply(x, layer.weight, a, b, kept, scaling / (1 - dropout))
        return y if layer.bias is None else y + layer.bias


def _added(x: Tensor, layer: nn.Linear, a: Tensor, b: Tensor) -> Tensor:
    if x.dtype is torch.float32:
        # For many tokens, adding the adapter to the weight first is the shorter way.
        return functional.linear(x, torch.addmm(layer.weight, b, a), layer.bias)
    # In bfloat16 a weight would swallow a small adapter: the two ways stay apart, as they do in serving.
    return functional.linear(x, layer.weight, layer.bias) + x @ a.T @ b.T


class _AddLora(torch.autograd.Function):
    """y = x W' + s (x * kept) A' B', with W frozen."""

    @staticmethod
    def forward(  # noqa: PLR0913 (the operands of one formula)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        kept: Tensor | None,
        scaling: float,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        kept = None if kept is None else kept.view(rows.shape)
        thinned = rows if kept is None else rows * kept
        low = thinned @ a.T
        y = functional.linear(x, weight)
        y.view(len(rows), -1).addmm_(low, b.T, alpha=scaling)
        ctx.save_for_backward(thinned, kept, low, weight, a, b)
        ctx.scaling = scaling
        return y  # no view of another tensor: Falcon adds to it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        thinned, kept, low, weight, a, b = ctx.saved_tensors
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        grad_low = (rows @ b).mul_(ctx.scaling)
        grad_b = (rows.T @ low).mul_(ctx.scaling)
        grad_a = grad_low.T @ thinned
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = rows @ weight
            if kept is None:
                grad_x.addmm_(grad_low, a)
            else:
                grad_x.addcmul_(grad_low @ a, kept)
            grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        return grad_x, None, grad_a, grad_b, None, None
