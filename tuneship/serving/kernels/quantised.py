"""Weights of 8 or 4 bits, which are multiplied with tokens without being unpacked in memory.

They are a quarter to a seventh of the size of float32. Tokens are rounded just for the product: to 8 bits by our
kernels (`integer_kernels`), to bfloat16 by torch's, which are used where ours do not run.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from tuneship.serving.kernels.integer_kernels import Kernels
from tuneship.serving.kernels.layout import GROUP, ZEROS, pack_int4, pack_int8

# Torch's kernels read beyond the end of a weight whose rows are not a multiple of this.
ROWS_MULTIPLE = 16
# The ends of a group are tried at these shares of its extremes: a coarse step for a single outlier
# costs the others more than the outlier gains.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
# Rows that are quantised at once, so that the float32 copies stay small.
ROWS_AT_ONCE = 1024
# Numbers this close to whole steps were quantised with these groups before, e.g. in a GGUF file.
ON_GRID = 0.05


class ConstantProduct(Protocol):
    """Computes x @ weight.T for tokens x [T, in] and a constant weight [out, in]."""

    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in]: [T, out]."""
        ...

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """Multiply x [T, in] and add a residual [T, out], into a new tensor."""
        ...


class Int8Product:
    """A weight of 8 bits with one scale per row."""

    def __init__(self, weight: Tensor, compiled: Kernels | None = None) -> None:
        """Round a weight [out, in] in float32, which the caller may drop; `in` is a multiple of `GROUP`.

        `compiled`: our kernels; None: torch's.
        """
        self._rows, self._compiled = len(weight), compiled
        values, scales = round_to_int8(weight)
        values, self._scales = _padded(values), _padded(scales)
        self._values = values if compiled is None else pack_int8(values)
        self.nbytes = self._values.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in]: [T, out], both float32."""
        if self._compiled is not None:
            product = self._compiled.multiply(8, x, self._values, self._scales, len(self._scales))
            return product if product.shape[1] == self._rows else _first(product, self._rows)
        product = torch.ops.aten._weight_int8pack_mm(  # noqa: SLF001 (no public name)
            x.bfloat16(), self._values, self._scales
        )
        return product[:, : self._rows].float()

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """Multiply x [T, in] and add a residual [T, out], into a new tensor."""
        return self(x).add_(residual)

    def rows(self, numbers: Tensor) -> Tensor:
        """Return the rows of the weight with these numbers [T]: [T, in] in float32."""
        if self._compiled is None:
            values = self._values[numbers].float()
        else:
            lanes = self._values.shape[2]
            values = self._values[numbers // lanes, :, numbers % lanes].flatten(1).float()
            values -= ZEROS[8]
        return values * self._scales[numbers].float()[:, None]


class Int4Product:
    """A weight of 4 bits with a scale and an offset for each `GROUP` numbers of a row: 5 bits per number in total."""

    def __init__(self, weight: Tensor, compiled: Kernels | None = None) -> None:
        """Round a weight [out, in] in float32, which the caller may drop; `in` is a multiple of `GROUP`.

        `compiled`: our kernels; None: torch's.
        """
        self._rows, self._compiled = len(weight), compiled
        values, scales, offsets = (_padded(part) for part in round_to_int4(weight))
        self._padded_rows = len(values)
        if compiled is not None:
            self._values, self._scales = pack_int4(values, scales, offsets)
        else:
            packed = values.int()
            self._values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(packed, 1)  # noqa: SLF001
            self._scales = torch.stack([scales, offsets], dim=-1).transpose(0, 1).contiguous()
        self.nbytes = self._values.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in]: [T, out], both float32."""
        if self._compiled is not None:
            product = self._compiled.multiply(4, x, self._values, self._scales, self._padded_rows)
            return product if product.shape[1] == self._rows else _first(product, self._rows)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(  # noqa: SLF001 (no public name)
            x.bfloat16(), self._values, GROUP, self._scales
        )
        return product[:, : self._rows].float()

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """Multiply x [T, in] and add a residual [T, out], into a new tensor."""
        return self(x).add_(residual)


def _first(product: Tensor, rows: int) -> Tensor:
    return product[:, :rows].contiguous()


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [out, in]: values [out, in] of int8, scales [out] of bfloat16; each number is value * scale."""
    scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
    values = (weight / scales.float()[:, None]).round_().clamp_(-127, 127)
    return values.to(torch.int8), scales


def round_to_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight [out, in] in groups, each by the range that leaves the smallest squared error.

    Returns values [out, in] of 0 to 15 in uint8, and scales and offsets [out, in / GROUP] of bfloat16; each number is
    (value - 8) * scale + offset. Numbers that were quantised with the same groups before stay on their steps.
    """
    parts = [_round_rows(rows) for rows in weight.split(ROWS_AT_ONCE)]
    values, scales, offsets = (torch.cat(part) for part in zip(*parts, strict=True))
    return values.flatten(1), scales, offsets


def _round_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = rows.unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    best = _round_groups(groups, low, high)
    step = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    steps = (groups - low) / step
    if float((steps - steps.round()).abs().max()) > ON_GRID:
        for share in SHARES[1:]:
            tried = _round_groups(groups, low * share, high * share)
            is_better = tried[3] < best[3]
            best = tuple(
                torch.where(is_better, new, old) for new, old in zip(tried, best, strict=True)
            )
    values, scales, offsets, _ = best
    return values, scales.squeeze(-1), offsets.squeeze(-1)


def _round_groups(groups: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
    """Round groups [out, n, GROUP] between two ends [out, n, 1]: values, scales, offsets and squared errors."""
    tiny = torch.finfo(torch.bfloat16).tiny
    scales = ((high - low) / 15).clamp(min=tiny).bfloat16()
    step = scales.float()
    offsets = (low + 8 * step).bfloat16()
    middle = offsets.float()
    values = ((groups - middle) / step).round_().add_(8).clamp_(0, 15)
    errors = ((values - 8) * step + middle - groups).square_().sum(-1, keepdim=True)
    return values.to(torch.uint8), scales, offsets, errors


def _padded(rows: Tensor) -> Tensor:
    missing = -len(rows) % ROWS_MULTIPLE
    if rows.dim() == 1:
        return F.pad(rows, (0, missing))
    return F.pad(rows, (0, 0, 0, missing))
