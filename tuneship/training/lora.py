"""peft's LoRA layer with a faster forward and backward on CPU; the files it saves are peft's own.

It computes the same as `peft.tuners.lora.Linear` up to rounding. On small models half of a peft step is bookkeeping: a
third is drawing dropout masks (torch draws them one number at a time), the rest passes over memory for scaling and
adding. Here a mask costs 16 random bits a number, drawn in bulk, and one autograd function keeps what its backward
needs. Next: `learner.py`.
"""

from typing import Any, cast

import numpy as np
import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn import functional

# A number is dropped when its 16 random bits fall below a threshold: dropout is rounded to 1 / 65536.
RANDOM_VALUES = 1 << 16


class Noise:
    """Random bits for dropout: a function of seed, step and rank alone, so that resuming needs no state."""

    def __init__(self, seed: int, rank: int = 0) -> None:
        """Start with the bits of step 0."""
        self._seed = seed
        # Rank 0 draws the same bits as the only process of a job.
        self._rank = [rank] if rank else []
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Restart the random bits, with those of `step`."""
        self._bits = np.random.SFC64(np.random.SeedSequence([self._seed, step, *self._rank]))

    def dropout_mask(self, like: Tensor, dropout: float) -> Tensor:
        """A mask in the shape and type of `like`: 0 with probability `dropout`, else 1."""
        count = like.numel()
        draws = self._bits.random_raw(-(-count // 4)).view(np.int16)[:count]
        lowest_kept = round(dropout * RANDOM_VALUES) - RANDOM_VALUES // 2
        return (torch.from_numpy(draws) >= lowest_kept).view(like.shape).to(like.dtype)


class FusedLinear(Linear):
    """One adapter on a linear layer, without merging, mixing or variants (what training needs)."""

    # Set once after the layer is made; shared by all layers.
    noise: Noise

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """The layer with its adapter: shape (..., in) to (..., out)."""
        name = self.active_adapters[0]
        # The adapter is float32 whatever the base model is: small steps would be lost in bfloat16.
        a = cast("Tensor", self.lora_A[name].weight).to(x.dtype)
        b = cast("Tensor", self.lora_B[name].weight).to(x.dtype)
        scaling = self.scaling[name]
        layer = cast("nn.Linear", self.get_base_layer())
        if not self.training:
            b = b * scaling
            if x.dtype is torch.float32:
                # For many tokens it is faster to add the adapter to the weight first.
                return functional.linear(x, torch.addmm(layer.weight, b, a), layer.bias)
            # Rounded to bfloat16, a merged weight would lose a small adapter: both are applied apart, as in serving.
            return functional.linear(x, layer.weight, layer.bias) + x @ a.T @ b.T
        dropout = getattr(self.lora_dropout[name], "p", 0.0)
        mask = self.noise.dropout_mask(x, dropout) if dropout else None
        y = _AddLora.apply(x, layer.weight, a, b, mask, scaling / (1 - dropout))
        return y if layer.bias is None else y + layer.bias


class _AddLora(torch.autograd.Function):
    """y = x W' + s (x * mask) A' B', with W frozen."""

    @staticmethod
    def forward(  # noqa: PLR0913 (the operands of one formula)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        mask: Tensor | None,
        scaling: float,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        mask = None if mask is None else mask.view(rows.shape)
        dropped = rows if mask is None else rows * mask
        low = dropped @ a.T
        y = functional.linear(x, weight)
        y.view(len(rows), -1).addmm_(low, b.T, alpha=scaling)
        ctx.save_for_backward(dropped, mask, low, weight, a, b)
        ctx.scaling = scaling
        # Falcon adds to the result in place, which autograd allows for no view of another tensor.
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dropped, mask, low, weight, a, b = ctx.saved_tensors
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        grad_low = (rows @ b).mul_(ctx.scaling)
        grad_b = (rows.T @ low).mul_(ctx.scaling)
        grad_a = grad_low.T @ dropped
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = rows @ weight
            if mask is None:
                grad_x.addmm_(grad_low, a)
            else:
                grad_x.addcmul_(grad_low @ a, mask)
            grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        return grad_x, None, grad_a, grad_b, None, None
