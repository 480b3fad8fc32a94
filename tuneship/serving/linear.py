"""Products of tokens with weights that never change, by whichever library computes them faster on this machine.

For few tokens half the time of a product goes into reading the weights in the order in which the processor wants them.
oneDNN takes weights that were laid out once; whether that is faster here is tried, once per process and number format.
"""

import math
import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn

# The trial: so many tokens through a layer of this width, the best of so many rounds.
_ROWS, _WIDTH, _ROUNDS = 32, 1024, 8
# Weights up to this size are there both ways: the call of oneDNN takes longer than a small
# product.
SMALL_BYTES = 1 << 20
# Of a weight that others use too (a head that is the embedding), a second copy is made up to this
# size. As it is, one of 152,000 tokens takes a quarter to two fifths of a step of 0.5 B
# parameters; laid out, half of that or more.
SHARED_BYTES = 512 << 20
# Multiplications up to which a plain product is faster: those of 48 tokens with a weight of 128
# by 128.
SMALL_PRODUCT = 3 << 18
# oneDNN compiles a product again for each number of tokens, which takes longer than most products.
# Beyond this number they are filled up to one of eight sizes an octave: at most 12.5 % more of
# them.
FEW_TOKENS = 32


class Product:
    """x @ weight.T for tokens x [T, in] and a weight [out, in]."""

    def __init__(self, weight: Tensor, *, shared: bool = False) -> None:
        """The weight is copied and may be forgotten; a large one that others use too is kept as it is."""
        self._laid_out = self._plain = None
        self._numbers = weight.numel()
        self.nbytes = weight.nbytes
        """Of the weight."""
        if prefers_layout(weight.dtype):
            self._laid_out = _lay_out_unless_kept(weight, shared)
        if self._laid_out is None or weight.nbytes <= SMALL_BYTES:
            # [in, out] in memory is faster than torch's [out, in] for few tokens
            self._plain = weight.t() if shared else weight.t().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """For x [T, in] the [T, out]."""
        plain = self._plain_for(x)
        return _multiply_filled(x, self._laid_out) if plain is None else x @ plain

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """The product of x added to a residual [T, out], as a new tensor."""
        plain = self._plain_for(x)
        if plain is not None:
            return torch.addmm(residual, x, plain)
        if _filled(len(x)) != len(x):
            return _multiply_filled(x, self._laid_out).add_(residual)
        return torch.ops.mkldnn._linear_pointwise.binary(  # noqa: SLF001 (no public name)
            x, residual, self._laid_out, None, "add"
        )

    def plus(self, delta: Tensor) -> "Product":
        """Another one, whose weight is larger by delta [out, in]."""
        weight = self._laid_out.to_dense() if self._plain is None else self._plain.t()  # type: ignore[union-attr]
        return Product(weight + delta)

    def _plain_for(self, x: Tensor) -> Tensor | None:
        is_small = len(x) * self._numbers <= SMALL_PRODUCT
        return self._plain if self._laid_out is None or is_small else None


class LaidOutLinear(nn.Linear):
    """A linear layer of a loaded model with its weight laid out, in place of it."""

    def __init__(self, linear: nn.Linear, *, shared: bool) -> None:
        """As with `Product`: the plain weight may be forgotten, but for a large one that others use too."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = _lay_out_unless_kept(linear.weight, shared)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """For [..., in] the [..., out]."""
        return _multiply_filled(input, self.weight, self.bias)


def lay_out_layers(model: nn.Module) -> None:
    """Replace the linear layers of a model whose products become faster by it."""
    tensors = [id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False)]
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module.weight.nbytes <= SMALL_BYTES:
            continue
        if prefers_layout(module.weight.dtype):
            is_shared = tensors.count(id(module.weight)) > 1
            model.set_submodule(name, LaidOutLinear(module, shared=is_shared))


def prefers_layout(dtype: torch.dtype) -> bool:
    """Whether weights laid out by oneDNN are the faster ones here."""
    plain, laid_out = _trial(dtype)
    return laid_out < plain


def product_seconds(dtype: torch.dtype) -> float:
    """Of the trial, by the faster way. A processor may list instructions for a format and still be slow with it."""
    return min(_trial(dtype))


@cache
def _trial(dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of plain products and of those of oneDNN, infinite where it has none or another result."""
    tokens = torch.linspace(-1, 1, _ROWS * _WIDTH).view(_ROWS, _WIDTH).to(dtype)
    weight = torch.linspace(-1, 1, _WIDTH * _WIDTH).view(_WIDTH, _WIDTH).cos().to(dtype)
    plain = weight.t().contiguous()
    plain_seconds = _best(lambda: tokens @ plain)
    try:
        laid_out = _lay_out(weight)
        found, expected = _multiply(tokens, laid_out), tokens @ plain
        tolerance = (1e-2 if dtype is torch.bfloat16 else 1e-4) * float(expected.abs().max())
        if not torch.allclose(found, expected, rtol=0, atol=tolerance):
            return plain_seconds, math.inf
        return plain_seconds, _best(lambda: _multiply(tokens, laid_out))
    except (AttributeError, RuntimeError):  # not built in, or not for this processor
        return plain_seconds, math.inf


def _lay_out(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)  # noqa: SLF001


def _lay_out_unless_kept(weight: Tensor, shared: bool) -> Tensor:
    return weight if shared and weight.nbytes > SHARED_BYTES else _lay_out(weight)


def _filled(tokens: int) -> int:
    """How many tokens a product is computed for in place of so many."""
    size = 1 << max(0, tokens.bit_length() - 4)
    return tokens if tokens <= FEW_TOKENS else math.ceil(tokens / size) * size


def _multiply_filled(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """[..., T, in] -> [..., T, out]."""
    tokens = x.shape[-2]
    missing = _filled(tokens) - tokens
    if not missing:
        return _multiply(x, weight, bias)
    return _multiply(F.pad(x, (0, 0, 0, missing)), weight, bias)[..., :tokens, :]


def _multiply(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], None)  # noqa: SLF001


def _best(work: Callable[[], object]) -> float:
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
