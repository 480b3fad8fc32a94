"""One adapter added into a copy of the weights, for the steps in which every row uses it.

A small model that answers for one tuned model spends a fifth of a step on the adapter. Rows of other adapters, and of
none, never see the copy: a step in which any of them runs goes by the base's weights and the deltas (`lora`).
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tuneship.serving.linear import Product

# Steps in a row with one adapter only, before its merging begins: two that take turns are left as
# they are.
STEADY_STEPS = 16
# Weights up to this size in all are copied, in as many layouts as the base has. Of larger ones
# the products are nearly all of a step, and an adapter little.
MERGED_BYTES = 64 << 20


class Merged:
    """The products of at most one adapter, by number; one more of them is made in each step, so that none is long."""

    def __init__(self, products: Items[Product | None], dtype: torch.dtype) -> None:
        """No memory before an adapter was alone for a while. None: a product that the model keeps to itself."""
        self._base = _mergeable(products, dtype)
        self._adapter: str | None = None
        self._products: list[Product] = []
        self._last: str | None = None
        self._steps = 0

    def step(self, adapter: str, delta: Callable[[int], Tensor | None]) -> Items[Product]:
        """Of a step in which all tokens are of this adapter, the first products merged; the others are the base's.

        `delta`: by number, the change [out, in] of the weight, or None.
        """
        self._steps = self._steps + 1 if adapter == self._last else 1
        self._last = adapter
        if adapter != self._adapter:
            if self._steps <= STEADY_STEPS or not self._base:
                return ()
            self._adapter, self._products = adapter, []
        number = len(self._products)
        if number < len(self._base):
            change = delta(number)
            base = self._base[number]
            self._products.append(base if change is None else base.plus(change))
        return self._products

    def interrupt(self) -> None:
        """A step of several adapters, or of none."""
        self._last = None

    def forget(self, adapter: str) -> None:
        """Its matrices have gone, or are others."""
        if adapter == self._last:
            self._last = None
        if adapter == self._adapter:
            self._adapter, self._products = None, []


def _mergeable(products: Items[Product | None], dtype: torch.dtype) -> Items[Product]:
    """All of them or none; in bfloat16 none: a weight has eight bits there, and a small delta would be rounded away."""
    known = [product for product in products if product is not None]
    is_small = sum(product.nbytes for product in known) <= MERGED_BYTES
    is_exact = dtype == torch.float32
    return known if is_small and is_exact and len(known) == len(products) else ()
