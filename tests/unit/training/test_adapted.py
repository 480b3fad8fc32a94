"""A stored adapter is added to a model as peft does it; one that is more than plain LoRA is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tuneship.training.row_losses import adapted

X = torch.eye(4)
MORE = {
    "magnitudes": {"use_dora": True},
    "biases of layers": {"bias": "lora_only"},
    "biases of its own": {"lora_bias": True},
    "whole layers": {"modules_to_save": ["head"]},
    "embeddings": {"target_modules": ["tokens"]},
}


class Network(nn.Module):
    """The smallest model that has each kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def model_with(seed: int, **options: Any) -> Any:
    """The same network whatever the seed, with an adapter drawn from it."""
    settings: dict[str, Any] = {"target_modules": ["body"], "r": 2, "lora_alpha": 6, **options}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Network()
        torch.manual_seed(seed)
        return get_peft_model(network, LoraConfig(init_lora_weights=False, **settings))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "alpha_pattern": {"body": 3}}])
def test_it_computes_what_peft_computes(tmp_path: Path, options: dict[str, Any]) -> None:
    stored, other = model_with(1, **options), model_with(2, r=3)
    stored.save_pretrained(tmp_path)
    before = other(X)
    with other.disable_adapter(), adapted(other, tmp_path, None):
        torch.testing.assert_close(other(X), stored(X))
    torch.testing.assert_close(other(X), before)
    assert not torch.allclose(stored(X), before)


@pytest.mark.filterwarnings("ignore:Adapter 'default'. 1 LoRA tensor.s. have invalid shape")
@pytest.mark.parametrize("options", MORE.values(), ids=MORE)
def test_more_than_plain_lora_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    model_with(1, **options).save_pretrained(tmp_path)
    model = model_with(2)
    with (
        pytest.raises(ValueError, match="more than plain LoRA matrices"),
        adapted(model, tmp_path, None),
    ):
        pass
