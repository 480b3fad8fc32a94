"""The layout of packed weights, and of the jobs that threads share.

A packed weight [out, in] has blocks of `LANES` rows, in each block groups of `GROUP` inputs, in each group
vectors of 32 bytes with four neighbouring inputs of each row. A byte of 4 bits holds two numbers, whose inputs are four
apart: the low bits come first. A byte of 8 bits, the number plus 128, is multiplied as two numbers of 4 bits, because
sums of products of 4 and 8 bits fit the processor's 16-bit lanes.
"""

import torch
from torch import Tensor

GROUP = 32
# Rows of a weight that are multiplied at once: the float32 lanes of a vector of AVX2.
LANES = 8
VECTOR_BYTES = 32
# Tokens that share one unpacking of a weight, without and with dot products; more need more registers than there are.
TOKENS_AT_ONCE = {False: (4, 2, 1), True: (8, 4, 2, 1)}
# A job, in 64-bit numbers: the pieces that nobody has taken, those that are done (in cache lines of their own), the
# cycles that the end of the last piece was waited for, the function's address, and its arguments.
REMAINING, DONE, WAITED, FUNCTION, ARGUMENTS, JOB_NUMBERS = 0, 8, 16, 17, 18, 32
# A thread looks for work so often, for a millisecond or two, before it sleeps: waking it takes longer than a product.
PATIENCE = 40_000
# The number of each width that stands for zero.
ZEROS = {4: 8, 8: 128}


def pack_int4(values: Tensor, scales: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out numbers [out, in] of 0 to 15 and their scales and offsets [out, groups]: bytes and bfloat16.

    A number is (value - 8) * scale + offset.
    """
    blocks = len(values) // LANES
    parts = values.view(blocks, LANES, -1, 4, 2, 4).permute(0, 2, 3, 1, 5, 4)
    pairs = torch.stack([scales, offsets], dim=-1).view(blocks, LANES, -1, 2)
    packed = parts[..., 0] | (parts[..., 1] << 4)
    return packed.contiguous(), pairs.permute(0, 2, 3, 1).contiguous()


def pack_int8(values: Tensor) -> Tensor:
    """Lay out numbers [out, in] of int8: bytes [out / LANES, in / 4, LANES, 4]."""
    shifted = values.view(torch.uint8) ^ ZEROS[8]
    return shifted.view(len(values) // LANES, LANES, -1, 4).transpose(1, 2).contiguous()
