"""The quick ways through the model give the same results as peft and transformers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tuneship.training.base_model import load_base
from tuneship.training.examples.batches import collate
from tuneship.training.examples.tokenized_examples import TokenizedExamples
from tuneship.training.learner import Learner
from tuneship.training.lora import FusedLinear, Noise, zero_dropped
from tuneship.training.objective import SupervisedFineTuning
from tuneship.training.spec import ResolvedHyperparameters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

# Where our own layer runs.
CPU = torch.device("cpu")


def settings(**changes: object) -> ResolvedHyperparameters:
    values: dict[str, object] = {
        "learning_rate": 0.01,
        "batch_size": 4,
        "epochs": 1,
        "warmup_steps": 0,
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "lora_dropout": 0.0,
        "target_modules": ("all-linear",),
        "seed": 3,
    }
    return ResolvedHyperparameters(**(values | changes))  # type: ignore[arg-type]


def some_rows() -> TokenizedExamples:
    """Make four rows of very different lengths, with the last 3 tokens of each to be learnt."""
    random = np.random.Generator(np.random.PCG64(1))
    lengths = [4, 21, 9, 14]
    learnt = np.concatenate([np.arange(length) >= length - 3 for length in lengths])
    tokens = random.integers(5, 200, sum(lengths), dtype=np.int32)
    return TokenizedExamples(tokens, learnt, np.cumsum([0, *lengths]))


def peft_model(base: Path, adapter: dict[str, torch.Tensor]) -> PeftModel:
    """Load the same adapter to run by peft and transformers themselves."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.load_state_dict(adapter, strict=False)
    return model


def peft_loss(model: PeftModel, rows: TokenizedExamples) -> torch.Tensor:
    """The mean loss of the tokens to be learnt, each row alone: no other row can change it."""
    losses: list[torch.Tensor] = []
    for number in range(len(rows)):
        row = collate(rows, np.array([number]))
        logits = model(input_ids=torch.from_numpy(row.tokens), use_cache=False).logits[0]
        targets = torch.from_numpy(row.targets)
        positions = torch.from_numpy(row.logit_positions)
        losses.append(
            torch.nn.functional.cross_entropy(logits[positions], targets, reduction="none")
        )
    return torch.cat(losses).mean()


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Return a dictionary that the next step fills with the gradient of each weight before it is clipped."""
    found: dict[str, torch.Tensor] = {}

    def remember(name: str) -> Callable[[torch.Tensor], None]:
        return lambda weight: found.__setitem__(name, weight.grad.cpu().clone())  # type: ignore[union-attr]

    for name, weight in learner.model.named_parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(remember(name))
    return found


@pytest.mark.parametrize("parts", [1, 4])
def test_a_step_has_the_loss_and_the_gradients_of_peft(tiny_model: Path, parts: int) -> None:
    rows = some_rows()
    learner = Learner(load_base(str(tiny_model)), settings(), SupervisedFineTuning())
    with torch.no_grad():
        for name, weight in learner.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    peft = peft_model(tiny_model, learner.adapter())
    loss = peft_loss(peft, rows)
    loss.backward()
    wanted = {name: p.grad for name, p in peft.named_parameters() if p.grad is not None}

    found = gradients(learner)
    batches = [collate(rows, part) for part in np.array_split(np.arange(4), parts)]
    assert learner.learn(batches, 12, step=1, rate=0.0) == pytest.approx(loss.item(), rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)


def test_measuring_gives_the_loss_of_peft(tiny_model: Path) -> None:
    rows = some_rows()
    learner = Learner(load_base(str(tiny_model)), settings(), SupervisedFineTuning())
    learner.learn([collate(rows, np.arange(4))], 12, step=1, rate=0.1)
    with torch.inference_mode():
        wanted = peft_loss(peft_model(tiny_model, learner.adapter()).eval(), rows).item()
    packed = learner.evaluate(collate(rows, np.arange(4)))
    assert packed["tokens"] == 12
    assert packed["loss"] / 12 == pytest.approx(wanted, rel=1e-5)
    alone = [learner.evaluate(collate(rows, np.array([number])))["loss"] for number in range(4)]
    assert sum(alone) / 12 == pytest.approx(wanted, rel=1e-5)


def test_dropout_keeps_the_asked_share_and_follows_from_seed_and_step() -> None:
    noise, again = Noise(1), Noise(1)
    for source in (noise, again):
        source.begin_step(5)
    count = 301 * 33
    kept = noise.kept_by_dropout(count, 0.2)
    assert kept.shape == (count,)
    assert kept.float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert torch.equal(kept, again.kept_by_dropout(count, 0.2))
    assert not torch.equal(kept, noise.kept_by_dropout(count, 0.2))
    noise.begin_step(6)
    assert not torch.equal(kept, noise.kept_by_dropout(count, 0.2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropped_values_become_zero_and_nothing_else_changes(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.5, -2.0, torch.inf], [-0.0, torch.nan, 3e38]], dtype=dtype)
    kept = torch.tensor([True, False, True, True, False, False])
    dropped = zero_dropped(values, kept)
    assert dropped.tolist() == [[1.5, 0.0, torch.inf], [-0.0, 0.0, 0.0]]
    assert dropped.signbit().tolist() == [[False, False, False], [True, False, False]]
    assert values[0, 1] == -2.0


def test_dropout_takes_one_byte_a_number_between_forward_and_backward(tiny_model: Path) -> None:
    def saved_bytes(dropout: float) -> int:
        base = load_base(str(tiny_model), place=CPU)
        learner = Learner(base, settings(lora_dropout=dropout), SupervisedFineTuning())
        saved: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = learner.loss(collate(rows, np.arange(4)))
        inputs.append(
            sum(
                int(module.in_features or 0)
                for module in learner.model.modules()
                if isinstance(module, FusedLinear)
            )
        )
        del loss
        return sum(storage.nbytes() for storage in saved.values())

    rows = some_rows()
    inputs: list[int] = []
    more = saved_bytes(0.1) - saved_bytes(0.0)
    tokens = collate(rows, np.arange(4)).tokens.size
    assert 0 < more <= inputs[0] * tokens


def test_dropout_is_on_while_learning_and_has_the_expected_mean(tiny_model: Path) -> None:
    base = load_base(str(tiny_model), place=CPU)
    learner = Learner(base, settings(lora_dropout=0.5), SupervisedFineTuning())
    layer = next(module for module in learner.model.modules() if isinstance(module, FusedLinear))
    with torch.no_grad():
        for weight in layer.lora_B["default"].parameters():
            weight.normal_()
    x = torch.randn(1, int(layer.in_features or 0))
    exact = layer.eval()(x)
    layer.train()
    draws = torch.stack([layer(x) for _ in range(2000)])
    assert not torch.equal(draws[0], draws[1])
    torch.testing.assert_close(
        draws.mean(0), exact, rtol=0.0, atol=4 * draws.std().item() / 2000**0.5
    )
