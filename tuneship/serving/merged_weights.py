"""Merged weights: one adapter added into a copy of the base's weights, for steps in which every token uses it.

A small model that answers for one tuned model spends a fifth of a step on the adapter. Tokens of other adapters, and of
none, never see the copy: a step with any of them uses the base's weights and the deltas (`lora`).
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tuneship.serving.kernels.quantised import ConstantProduct
from tuneship.serving.models.linear import Product

# Consecutive steps with one adapter only before it is merged: two adapters that alternate are
# never merged.
STEADY_STEPS = 16
# Total size of weights that are copied at most. In larger models nearly all of a step are the
# base's products, and the adapter costs little.
MERGED_BYTES = 64 << 20


class Merged:
    """The merged products of at most one adapter; each step merges one more product, so that no step takes long."""

    def __init__(
        self, products: Items[ConstantProduct | None], dtype: torch.dtype, merged_bytes: int
    ) -> None:
        """Allocate nothing before a merge begins; None in `products` is a product that the model keeps to itself.

        Nothing is merged into quantised weights, whose steps are larger than most deltas.
        """
        known = [product for product in products if isinstance(product, Product)]
        is_small = sum(product.nbytes for product in known) <= merged_bytes
        # A weight has eight significant bits in bfloat16, and a small delta would be rounded away.
        is_exact = dtype == torch.float32
        is_mergeable = is_small and is_exact and len(known) == len(products)
        self._base: Items[Product] = known if is_mergeable else ()
        self._adapter: str | None = None
        self._products: list[Product] = []
        self._last: str | None = None
        self._steps = 0

    def step(self, adapter: str, delta: Callable[[int], Tensor | None]) -> Items[Product]:
        """Return the products merged so far, if all tokens of the step use this adapter.

        `delta` gives the change [out, in] of a product's weight by its number, or None.
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
        """Note a step with several adapters, or with none."""
        self._last = None

    def forget(self, adapter: str) -> None:
        """Drop the copy of an adapter that was unloaded or replaced."""
        if adapter == self._last:
            self._last = None
        if adapter == self._adapter:
            self._adapter, self._products = None, []
