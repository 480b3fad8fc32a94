"""Attention over short rows in bfloat16 gives the values and gradients of torch's own."""

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.unit.training.test_learner import settings, some_rows
from tuneship.training.base_model import load_base
from tuneship.training.examples import packing
from tuneship.training.examples.batches import collate
from tuneship.training.examples.packing import ShortRows
from tuneship.training.learner import Learner
from tuneship.training.objective import SupervisedFineTuning


def values_and_gradients(
    attend: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    inputs = [one.clone().requires_grad_() for one in (query, key, value)]
    output = attend(*inputs)  # type: ignore[operator]
    grad = torch.randn(output.shape, generator=random).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


@pytest.mark.parametrize(
    ("rows", "heads", "keys", "width"), [(3, 4, 2, 17), (1, 3, 3, 1), (2, 6, 1, 40)]
)
def test_values_and_gradients_are_those_of_torch(
    rows: int, heads: int, keys: int, width: int
) -> None:
    random = torch.Generator().manual_seed(1)
    # Rows and tokens lie as the packed attention passes them on.
    query, key, value = (
        torch.randn(rows, width, number, 8, generator=random, dtype=torch.float64).transpose(1, 2)
        for number in (heads, keys, keys)
    )

    def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, scale=0.3
        )

    wanted = values_and_gradients(torchs, query, key, value)
    found = values_and_gradients(lambda q, k, v: ShortRows.apply(q, k, v, 0.3), query, key, value)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


# peft's own use of transformers.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_in_bfloat16_a_model_learns_as_exactly_as_with_torchs_attention(tiny_model: Path) -> None:
    def gradients(number_format: torch.dtype) -> torch.Tensor:
        base = load_base(str(tiny_model), lambda _parameters: number_format)
        learner = Learner(base, settings(), SupervisedFineTuning())
        with torch.no_grad():
            for name, weight in learner.model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
        learner.backward([collate(rows, np.arange(4))], 12, step=1)
        flat = torch.empty(learner.trainable_parameters)
        learner.move_gradient_to(flat)
        return flat

    rows = some_rows()
    exact = gradients(torch.float32)
    found = gradients(torch.bfloat16)
    with patch.object(packing, "SHORT_ROW_TOKENS", 0):
        torchs = gradients(torch.bfloat16)
    assert not torch.equal(found, torchs)
    assert (found - exact).norm() < 1.5 * (torchs - exact).norm()
