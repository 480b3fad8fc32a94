"""peft's LoRA layer with a faster forward and backward on CPU; the files it saves are peft's own.

It computes the same as `peft.tuners.lora.Linear` up to rounding. On small models half of a peft step is bookkeeping: a
third is drawing dropout masks (torch draws them one number at a time), the rest passes over memory for scaling and
adding. Here a mask costs 16 random bits a number, drawn in bulk, and one autograd function keeps what its backward
needs: the input, which the layer before or beside keeps anyway, and one byte a number for the mask. On a model of 135
million parameters these masks were a third of the memory of a step. Next: `learner.py`.
"""

from typing import Any, cast

import numpy as np
import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn import functional

# A number is dropped when its 16 random bits fall below a threshold: dropout is rounded to 1 / 65536.
RANDOM_VALUES = 1 << 16
# The integers with as many bytes as a number of a layer.
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Noise:
    """Random bits for dropout: a function of seed, step and rank alone, so that resuming needs no state."""

    def __init__(self, seed: int, rank: int = 0) -> None:
        """Start with the bits of step 0."""
        self._seed = seed
        # Rank 0 draws the same bits as the only process of a job.
        self._rank = [rank] if rank else []
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Restart the random bits with those of `step`."""
        self._bits = np.random.SFC64(np.random.SeedSequence([self._seed, step, *self._rank]))

    def kept_by_dropout(self, count: int, dropout: float) -> Tensor:
        """Which of `count` numbers are kept, as booleans: each is dropped with probability `dropout`."""
        draws = self._bits.random_raw(-(-count // 4)).view(np.int16)[:count]
        lowest_kept = round(dropout * RANDOM_VALUES) - RANDOM_VALUES // 2
        return torch.from_numpy(draws >= lowest_kept)


def zero_dropped(values: Tensor, kept: Tensor) -> Tensor:
    """A copy of contiguous `values` on the CPU with zeros where `kept`, of as many elements, is false.

    The bits are masked as integers: torch's products and choices by booleans take five times as long.
    """
    integer = {2: np.dtype(np.int16), 4: np.dtype(np.int32)}[values.element_size()]
    bits = values.view(torch.int16 if integer.itemsize == 2 else torch.int32).numpy()
    # True becomes -1, all of whose bits are set.
    mask = np.negative(kept.numpy().view(np.int8), dtype=integer).reshape(bits.shape)
    return torch.from_numpy(np.bitwise_and(bits, mask, out=mask)).view(values.dtype)


class FusedLinear(Linear):
    """One adapter on a linear layer, without merging, mixing or variants: just for training."""

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
        kept = self.noise.kept_by_dropout(x.numel(), dropout) if dropout else None
        y = _AddLora.apply(x, layer.weight, a, b, kept, scaling / (1 - dropout))
        return y if layer.bias is None else y + layer.bias


class _AddLora(torch.autograd.Function):
    """Compute y = x W' + s dropout(x) A' B', with frozen W."""

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
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        low = (rows if kept is None else zero_dropped(rows, kept)) @ a.T
        y = functional.linear(x, weight)
        y.view(len(rows), -1).addmm_(low, b.T, alpha=scaling)
        ctx.save_for_backward(rows, kept, low, weight, a, b)
        ctx.scaling = scaling
        # Falcon adds to the result in place, which autograd allows for no view of another tensor.
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, kept, low, weight, a, b = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        grad_low = (grad @ b).mul_(ctx.scaling)
        grad_b = (grad.T @ low).mul_(ctx.scaling)
        grad_a = grad_low.T @ (rows if kept is None else zero_dropped(rows, kept))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            if kept is None:
                grad_x.addmm_(grad_low, a)
            else:
                grad_x += zero_dropped(grad_low @ a, kept)
            grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        return grad_x, None, grad_a, grad_b, None, None
