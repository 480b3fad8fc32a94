"""Multiplies tokens with weights of 4 or 8 bits in integers, by machine code that LLVM makes when a replica starts.

Torch's kernels unpack a weight again for every few tokens. These unpack it once for four tokens, in registers, and
round the tokens to 8 bits with a scale for each `GROUP` numbers, as llama.cpp does. llvmlite brings LLVM in its wheel,
so no compiler is needed. What each token gets does not depend on the tokens beside it, bit for bit. The layout of the
weights: `layout.py`.
"""

import ctypes
import platform
import threading
import time
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tuneship.serving.batch import FlatBatch
from tuneship.serving.kernels.layout import (
    ARGUMENTS,
    FUNCTION,
    GROUP,
    JOB_NUMBERS,
    LANES,
    WAITED,
    ZEROS,
)

# Fewer multiplications than this (some 10 microseconds) are not worth sharing.
MIN_SHARED_NUMBERS = 1 << 18
# So many tokens of a step or fewer are those of few requests, which leave cores idle.
FEW_TOKENS = 2
# Pieces of a product for each of the threads that share it: enough for the last one to be short.
PIECES = 16
# After a longer wait than a piece takes, another program has the core of a helping thread. Then nothing is shared for
# many times as long, so that this costs little where cores are busy. A nanosecond has some 2.5 cycles.
LONG_WAIT_CYCLES, PAUSE_S_PER_CYCLE = 250_000, 20 / 2.5e9
NEEDED_FEATURES = ("avx2", "fma")
# An instruction that multiplies four bytes with four others and adds up the products, and twice as many registers.
DOT_FEATURES = ("avx512vnni", "avx512vl")


@cache
def kernels(*, may_dot: bool = True) -> "Kernels | None":
    """The kernels for this machine; None where they do not run.

    `may_dot`: use the processor's dot products if it has them, which changes the time and no bit.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    from tuneship.serving.kernels.kernel_code import (  # noqa: PLC0415 - loads LLVM: half a second
        compiled_kernels,
        host_has,
    )

    if not host_has(NEEDED_FEATURES):
        return None
    return Kernels(compiled_kernels(dots=may_dot and host_has(DOT_FEATURES)))


class Kernels:
    """The compiled functions, and threads that help with large products and long attention, and sleep between.

    To be used by one thread at a time.
    """

    # Threads for products of few tokens; 0: as many as torch's, as for more tokens.
    few_token_threads = 0

    def __init__(self, engine: Any) -> None:
        """Take the addresses of the functions out of the engine, which is kept, as it owns their code."""
        self._engine = engine
        address = engine.get_function_address
        self._products = {4: address("product4"), 8: address("product8")}
        self._attend = address("attend")
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
        self._round, self._run, self._help = (
            call(address(name)) for name in ("round", "run", "help")
        )
        self._rounded = _Rounded(0)
        self._shared, self._alone = ((ctypes.c_int64 * JOB_NUMBERS)() for _ in range(2))
        self._share_at = 0.0
        # One for each helping thread, which waits until it is released.
        self._gates: list[threading.Lock] = []

    def multiply(self, bits: int, x: Tensor, weight: Tensor, scales: Tensor, rows: int) -> Tensor:
        """Multiply x [T, in] of float32 with a packed weight of `rows` rows, a multiple of `LANES`: [T, rows]."""
        x = x.contiguous()
        tokens, width = x.shape
        numbers, groups, blocks = tokens * width, width // GROUP, rows // LANES
        if numbers > self._rounded.numbers:
            self._rounded = _Rounded(numbers)
        rounded = self._rounded.pointers
        out = torch.empty(tokens, rows)
        given = (x.data_ptr(), *rounded, tokens * groups, ZEROS[bits])
        self._round((ctypes.c_int64 * len(given))(*given), 0)

        threads = self._threads(tokens, numbers * rows)
        step = -(-blocks // (PIECES * threads))
        given = (weight.data_ptr(), scales.data_ptr(), *rounded, out.data_ptr())
        given = (*given, tokens, groups, blocks, rows, step)
        self._do(self._products[bits], given, -(-blocks // step), threads)
        return out

    def attend(
        self,
        qkv: Tensor,
        rotation: Tensor,
        batch: FlatBatch,
        cache: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """Attend from the decoding tokens of a batch: qkv [T, heads + 2 kv heads, dim] -> [tokens, heads, dim].

        Rotates queries and keys by `rotation` [T, 1, dim / 2], and stores keys and values in the cache: keys
        [slot, kv head, dim, position] and values [slot, kv head, position, dim]. Behind the last key there is room for
        `GROUP` numbers more. All are float32, and `dim` is a multiple of `GROUP`.
        """
        keys, values = cache
        count, kv_heads, dim, length = batch.decode_count, *keys.shape[1:]
        heads = qkv.shape[1] - 2 * kv_heads
        room = -(-batch.length // GROUP) * GROUP
        out, scores = torch.empty(count, heads, dim), torch.empty(count * kv_heads, room)
        tensors = (qkv, keys, values, batch.slots, batch.positions, rotation, out, scores)
        scale_bits = ctypes.c_int32.from_buffer(ctypes.c_float(scale)).value
        sizes = (heads // kv_heads, kv_heads, dim, length, room, scale_bits)
        given = (*(tensor.data_ptr() for tensor in tensors), *sizes)
        pieces, numbers = count * kv_heads, 2 * heads // kv_heads * dim * batch.length
        self._do(self._attend, given, pieces, self._threads(count, pieces * numbers), numbers)
        return out

    def _threads(self, tokens: int, numbers: int) -> int:
        """The number of threads for this many multiplications of some tokens."""
        if numbers < MIN_SHARED_NUMBERS:
            return 1
        few = self.few_token_threads if tokens <= FEW_TOKENS else 0
        return few or torch.get_num_threads()

    def _do(
        self, function: int, arguments: tuple[int, ...], pieces: int, threads: int, cycles: int = 0
    ) -> None:
        """Run a function for each piece, on this thread and on others if `threads` is more than 1.

        `cycles`: more than a piece takes, where that may be a long wait for the last one.
        """
        is_shared = threads > 1 and time.monotonic() >= self._share_at
        job = self._shared if is_shared else self._alone
        job[FUNCTION : ARGUMENTS + len(arguments)] = (function, *arguments)
        if is_shared:
            self._wake(threads - 1)
        self._run(job, pieces)
        if is_shared and job[WAITED] > max(LONG_WAIT_CYCLES, cycles):
            self._share_at = time.monotonic() + job[WAITED] * PAUSE_S_PER_CYCLE

    def _wake(self, helpers: int) -> None:
        while len(self._gates) < helpers:
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
            threading.Thread(target=self._serve, args=(gate,), daemon=True).start()
        for gate in self._gates[:helpers]:
            if gate.locked():
                gate.release()

    def _serve(self, gate: threading.Lock) -> None:
        while gate.acquire():
            self._help(self._shared, 0)


class _Rounded:
    """Memory for tokens that are rounded to 8 bits; kept between calls, because making it takes longer than a call."""

    def __init__(self, numbers: int) -> None:
        """`numbers`: its capacity."""
        self.numbers = numbers
        groups = numbers // GROUP
        self._values = torch.empty(numbers, dtype=torch.int8)
        self._sums = torch.empty(3, groups)  # scales and sums in float32, corrections in int32
        firsts = (self._sums.data_ptr() + place * groups * 4 for place in range(3))
        self.pointers = (self._values.data_ptr(), *firsts)
