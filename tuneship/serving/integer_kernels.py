"""Multiplies tokens with weights of 4 or 8 bits in integers, by machine code that LLVM makes when a replica starts.

Torch's kernels unpack a weight again for every few tokens. These unpack it once for four tokens, in registers, and
round the tokens to 8 bits with a scale for each `GROUP` numbers, as llama.cpp does. llvmlite brings LLVM in its wheel,
so no compiler is needed. What each token gets does not depend on the tokens beside it, bit for bit.

Layout of a packed weight [out, in]: blocks of `LANES` rows, in each block groups of `GROUP` inputs, in each group
vectors of 32 bytes with four neighbouring inputs of each row. A byte of 4 bits holds two numbers, whose inputs are four
apart: the low bits come first. A byte of 8 bits, the number plus 128, is multiplied as two numbers of 4 bits, because
sums of products of 4 and 8 bits fit the processor's 16-bit lanes.
"""

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GROUP = 32
# Rows of a weight that are multiplied at once: the float32 lanes of a vector of AVX2.
LANES = 8
VECTOR_BYTES = 32
# Tokens that share one unpacking of a weight, without and with dot products; more need more registers than there are.
TOKENS_AT_ONCE = {False: (4, 2, 1), True: (8, 4, 2, 1)}
# Fewer multiplications than this (some 10 microseconds) are not worth waking threads for.
MIN_PARALLEL_NUMBERS = 1 << 18
NEEDED_FEATURES = ("avx2", "fma")
# An instruction that multiplies four bytes with four others and adds up the products, and twice as many registers.
DOT_FEATURES = ("avx512vnni", "avx512vl")
# The number of each width that stands for zero.
ZEROS = {4: 8, 8: 128}


@cache
def kernels(*, may_dot: bool = True) -> "Kernels | None":
    """The kernels for this machine; None where they do not run or torch's threads cannot be used.

    `may_dot`: use the processor's dot products if it has them, which changes the time and no bit.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    from tuneship.serving.kernel_code import (  # noqa: PLC0415 - loads LLVM: half a second
        compiled_kernels,
        host_has,
    )

    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not libraries or not host_has(NEEDED_FEATURES):
        return None
    dots = may_dot and host_has(DOT_FEATURES)
    openmp = ctypes.CDLL(str(libraries[0]))
    symbols = {
        name: ctypes.cast(getattr(openmp, name), ctypes.c_void_p).value
        for name in ("omp_get_thread_num", "omp_get_num_threads")
    }
    return Kernels(compiled_kernels(symbols, dots=dots), openmp)


class Kernels:
    """The compiled functions, and the threads that they run on: those of torch, which wait between its own calls.

    To be used by one thread at a time.
    """

    def __init__(self, engine: Any, openmp: ctypes.CDLL) -> None:
        """Take the addresses of the functions out of the engine, which is kept, as it owns their code."""
        self._engine = engine
        self._round, product4, product8 = (
            _Function(engine.get_function_address(name), openmp.GOMP_parallel)
            for name in ("round", "product4", "product8")
        )
        self._products = {4: product4, 8: product8}
        self._rounded = _Rounded(0)

    def multiply(self, bits: int, x: Tensor, weight: Tensor, scales: Tensor, rows: int) -> Tensor:
        """Multiply x [T, in] of float32 with a packed weight of `rows` rows, a multiple of `LANES`: [T, rows]."""
        x = x.contiguous()
        tokens, width = x.shape
        numbers, groups = tokens * width, width // GROUP
        if numbers > self._rounded.numbers:
            self._rounded = _Rounded(numbers)
        rounded = self._rounded.pointers
        out = torch.empty(tokens, rows)
        self._round((x.data_ptr(), *rounded, tokens * groups, ZEROS[bits]), numbers * GROUP)
        given = (weight.data_ptr(), scales.data_ptr(), *rounded, out.data_ptr())
        self._products[bits]((*given, tokens, groups, rows // LANES, rows), numbers * rows)
        return out


class _Rounded:
    """Memory for tokens that are rounded to 8 bits; kept between calls, because making it takes longer than a call."""

    def __init__(self, numbers: int) -> None:
        """`numbers`: how many fit."""
        self.numbers = numbers
        groups = numbers // GROUP
        self._values = torch.empty(numbers, dtype=torch.int8)
        self._sums = torch.empty(3, groups)  # scales and sums in float32, corrections in int32
        firsts = (self._sums.data_ptr() + place * groups * 4 for place in range(3))
        self.pointers = (self._values.data_ptr(), *firsts)


class _Function:
    """A compiled function, whose only argument points to 64-bit arguments."""

    def __init__(self, address: int, in_parallel: Any) -> None:
        self._address, self._in_parallel = address, in_parallel
        in_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        in_parallel.restype = None
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __call__(self, arguments: tuple[int, ...], multiplications: int) -> None:
        """Run it on torch's threads if there is enough to multiply."""
        given = (ctypes.c_int64 * len(arguments))(*arguments)
        # Called directly, OpenMP counts one thread.
        if multiplications < MIN_PARALLEL_NUMBERS or (threads := torch.get_num_threads()) == 1:
            self._call(given)
        else:
            self._in_parallel(self._address, given, threads, 0)


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
