"""Products of tokens with constant weights, by whichever library is faster on this machine.

With few tokens, half the time of a product goes into reading the weights in the order in which the processor wants
them. oneDNN takes weights that were packed (laid out) once; whether that is faster here is measured once per process
and number format.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn

# The measurement: this many tokens through a layer of this width, the best of so many rounds.
_TRIAL_TOKENS, _TRIAL_WIDTH, _TRIAL_ROUNDS = 32, 1024, 8
# Weights up to this size are kept in both layouts: a call of oneDNN takes longer than a small
# product.
SMALL_BYTES = 1 << 20
# Weights that others use too (a head tied to the embedding) are copied only up to this size. As
# it is, a head of 152,000 tokens takes a quarter to two fifths of a step of 0.5 B parameters;
# packed, it still takes at least half of that.
SHARED_BYTES = 512 << 20
# A plain product is faster up to this many multiplications: those of 48 tokens with a weight of
# 128 by 128.
SMALL_PRODUCT = 3 << 18
# oneDNN compiles a product again for each number of tokens, which takes longer than most products.
# Larger numbers than this are padded to one of eight sizes an octave: at most 12.5 % more tokens.
UNPADDED_TOKENS = 32


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001 (no public name)
        weight.contiguous(), _TRIAL_TOKENS
    )


def _multiply(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], None)  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class PackedLibrary:
    """A library that multiplies with packed weights, which the measurement compares with plain products.

    Only the measurement can be given another one: products always use oneDNN.
    """

    # Pack a weight [out, in].
    pack: Callable[[Tensor], Tensor] = _pack
    # Multiply x [T, in] with a packed weight: [T, out].
    multiply: Callable[[Tensor, Tensor], Tensor] = _multiply


ONE_DNN = PackedLibrary()


@dataclass(frozen=True, slots=True)
class Packing:
    """Which weights are packed."""

    # Whether products with packed weights are faster; None: as measured on this machine.
    is_faster: bool | None = None
    small_bytes: int = SMALL_BYTES
    shared_bytes: int = SHARED_BYTES

    def is_faster_for(self, dtype: torch.dtype) -> bool:
        """Whether weights of a number format are packed."""
        return prefers_packed(dtype) if self.is_faster is None else self.is_faster

    def pack(self, weight: Tensor, *, shared: bool) -> Tensor:
        """Pack a weight, unless others use it too and it is large."""
        return weight if shared and weight.nbytes > self.shared_bytes else _pack(weight)


AS_MEASURED = Packing()


class Product:
    """Computes x @ weight.T for tokens x [T, in] and a weight [out, in]."""

    def __init__(
        self, weight: Tensor, *, shared: bool = False, packing: Packing = AS_MEASURED
    ) -> None:
        """Copy the weight, which the caller may drop; a large shared one is used as it is."""
        self._packed = self._plain = None
        self._packing = packing
        self._numbers = weight.numel()
        # Size of the weight.
        self.nbytes = weight.nbytes
        if packing.is_faster_for(weight.dtype):
            self._packed = packing.pack(weight, shared=shared)
        if self._packed is None or weight.nbytes <= packing.small_bytes:
            # [in, out] in memory is faster than torch's [out, in] for few tokens
            self._plain = weight.t() if shared else weight.t().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in]: [T, out]."""
        plain = self._plain_for(x)
        return _multiply_padded(x, self._packed) if plain is None else x @ plain

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """Multiply x [T, in] and add a residual [T, out], into a new tensor."""
        plain = self._plain_for(x)
        if plain is not None:
            return torch.addmm(residual, x, plain)
        if _padded_count(len(x)) != len(x):
            return _multiply_padded(x, self._packed).add_(residual)
        return torch.ops.mkldnn._linear_pointwise.binary(  # noqa: SLF001 (no public name)
            x, residual, self._packed, None, "add"
        )

    def plus(self, delta: Tensor) -> "Product":
        """Make a product with the delta [out, in] added to its weight."""
        weight = self._packed.to_dense() if self._plain is None else self._plain.t()  # type: ignore[union-attr]
        return Product(weight + delta, packing=self._packing)

    def _plain_for(self, x: Tensor) -> Tensor | None:
        is_small = len(x) * self._numbers <= SMALL_PRODUCT
        return self._plain if self._packed is None or is_small else None


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight, in place of a loaded model's own layer."""

    def __init__(self, linear: nn.Linear, *, shared: bool, packing: Packing) -> None:
        """Copy the weight like `Product`, so that the caller may drop it; a large shared one is used without a copy."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = packing.pack(linear.weight, shared=shared)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Multiply [..., in] and add the bias: [..., out]."""
        return _multiply_padded(input, self.weight, self.bias)


def pack_layers(model: nn.Module, packing: Packing) -> None:
    """Replace the linear layers of a model that are faster with packed weights."""
    tensors = [id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False)]
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module.weight.nbytes <= packing.small_bytes:
            continue
        if packing.is_faster_for(module.weight.dtype):
            is_shared = tensors.count(id(module.weight)) > 1
            model.set_submodule(name, PackedLinear(module, shared=is_shared, packing=packing))


def prefers_packed(dtype: torch.dtype, library: PackedLibrary = ONE_DNN) -> bool:
    """Whether products with packed weights are faster on this machine."""
    plain, packed = _trial_seconds(dtype, library)
    return packed < plain


def product_seconds(dtype: torch.dtype, library: PackedLibrary = ONE_DNN) -> float:
    """Seconds that the measured product takes by the faster library.

    A processor may list instructions for a number format and still be slow with it.
    """
    return min(_trial_seconds(dtype, library))


@cache
def _trial_seconds(dtype: torch.dtype, library: PackedLibrary) -> tuple[float, float]:
    """Measure plain and packed products; missing or wrong packed ones count as infinitely slow."""
    numbers = torch.linspace(-1, 1, _TRIAL_TOKENS * _TRIAL_WIDTH)
    tokens = numbers.view(_TRIAL_TOKENS, _TRIAL_WIDTH).to(dtype)
    weight = torch.linspace(-1, 1, _TRIAL_WIDTH * _TRIAL_WIDTH)
    weight = weight.view(_TRIAL_WIDTH, _TRIAL_WIDTH).cos().to(dtype)
    plain = weight.t().contiguous()
    plain_seconds = _best_seconds(lambda: tokens @ plain)
    try:
        packed = library.pack(weight)
        actual, expected = library.multiply(tokens, packed), tokens @ plain
        tolerance = (1e-2 if dtype is torch.bfloat16 else 1e-4) * float(expected.abs().max())
        if not torch.allclose(actual, expected, rtol=0, atol=tolerance):
            return plain_seconds, math.inf
        return plain_seconds, _best_seconds(lambda: library.multiply(tokens, packed))
    except (AttributeError, RuntimeError):  # not built in, or not for this processor
        return plain_seconds, math.inf


def _best_seconds(work: Callable[[], object]) -> float:
    seconds: list[float] = []
    for _ in range(_TRIAL_ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _padded_count(tokens: int) -> int:
    """Number of tokens that a product is computed for in place of `tokens`."""
    size = 1 << max(0, tokens.bit_length() - 4)
    return tokens if tokens <= UNPADDED_TOKENS else math.ceil(tokens / size) * size


def _multiply_padded(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Multiply [..., T, in] with T padded to one of few sizes: [..., T, out]."""
    tokens = x.shape[-2]
    padding = _padded_count(tokens) - tokens
    if not padding:
        return _multiply(x, weight, bias)
    return _multiply(F.pad(x, (0, 0, 0, padding)), weight, bias)[..., :tokens, :]
