"""Quantised weights: each kind answers as its rounded weights do, with adapters in full precision on top."""

import asyncio
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.serving.conftest import StartReplica
from tests.unit.serving.test_engine import run
from tuneship.prompts.parity import Parity, Probe
from tuneship.serving.adapters import AdapterRefused
from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.kernels.integer_kernels import MIN_SHARED_NUMBERS, Kernels, kernels
from tuneship.serving.kernels.layout import GROUP
from tuneship.serving.kernels.quantised import (
    Int4Product,
    Int8Product,
    round_to_int4,
    round_to_int8,
)
from tuneship.serving.models.llama import LlamaModel
from tuneship.serving.models.model import ModelRefused
from tuneship.serving.replica import load_model
from tuneship.serving.sequence import GenerateRequest
from tuneship.serving.weights import QUANTISED
from tuneship.serving.weights_choice import MeasuredWeights, fastest, measured_weights

# Tokens are rounded for a product, to bfloat16 (and so is its result) or to 8 bits.
ROUNDING = 1e-2
PROMPT = tuple(range(40, 60))


def dequantised(weight: Tensor, kind: str) -> Tensor:
    """The numbers that stand for a weight [out, in]."""
    if kind == "int8":
        values, scales = round_to_int8(weight)
        return values.float() * scales.float()[:, None]
    values, scales, offsets = round_to_int4(weight)
    steps = values.float().unflatten(1, (-1, GROUP)) - 8
    return (steps * scales.float()[..., None] + offsets.float()[..., None]).flatten(1)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("shape", [(48, 64), (261, 32), (5, 96), (640, 576)])
@pytest.mark.parametrize("tokens", [1, 3, 8, 33, 100])
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_product_is_that_of_the_rounded_weight(
    kind: str, tokens: int, shape: tuple[int, int], is_compiled: bool
) -> None:
    compiled = kernels() if is_compiled else None
    if is_compiled and compiled is None:
        pytest.skip("our kernels do not run on this machine")
    weight, x, residual = normal(*shape), normal(tokens, shape[1], seed=2), normal(tokens, shape[0])
    product = (Int8Product if kind == "int8" else Int4Product)(weight, compiled)
    expected = x @ dequantised(weight, kind).T
    allowed = ROUNDING * float(expected.abs().max())
    torch.testing.assert_close(product(x), expected, rtol=0, atol=allowed)
    kept = residual.clone()
    found = product.onto(residual, x)
    torch.testing.assert_close(found, expected + residual, rtol=0, atol=allowed)
    assert torch.equal(residual, kept)


@pytest.fixture
def compiled() -> Kernels:
    found = kernels()
    if found is None:
        pytest.skip("our kernels do not run on this machine")
    return found


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_token_gets_the_same_bits_whatever_is_beside_it(kind: str, compiled: Kernels) -> None:
    product = (Int8Product if kind == "int8" else Int4Product)(normal(64, 96), compiled)
    x = normal(15, 96, seed=2)
    together = product(x)
    for number in range(15):
        assert torch.equal(product(x[number : number + 1])[0], together[number])
    assert product(x[:0]).shape == (0, 64)


@pytest.mark.parametrize("kind", QUANTISED)
def test_threads_share_a_product_and_change_no_bit(kind: str, compiled: Kernels) -> None:
    weight, x = normal(1000, 288), normal(5, 288, seed=2)
    assert len(weight) * x.numel() > MIN_SHARED_NUMBERS
    product = (Int8Product if kind == "int8" else Int4Product)(weight, compiled)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = product(x)
        torch.set_num_threads(3)
        assert torch.equal(product(x), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_token_that_is_not_finite_has_no_finite_product_and_harms_no_other(
    kind: str, fault: float, compiled: Kernels
) -> None:
    product = (Int8Product if kind == "int8" else Int4Product)(normal(64, 96), compiled)
    x = normal(3, 96, seed=2)
    expected = product(x)
    x[1, 40] = fault
    found = product(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], expected[::2])


def test_the_rows_of_a_weight_are_the_same_in_both_layouts(compiled: Kernels) -> None:
    weight, numbers = normal(261, 64), torch.tensor([0, 7, 8, 260, 7])
    assert torch.equal(
        Int8Product(weight, compiled).rows(numbers), Int8Product(weight).rows(numbers)
    )


def test_rounding_is_by_half_a_step_at_most_and_four_bits_by_the_best_range() -> None:
    weight = normal(64, 128)
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert ((dequantised(weight, "int8") - weight).abs() <= 0.52 * steps).all()
    plain = weight.unflatten(1, (-1, GROUP))
    low, high = plain.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    naive = (((plain - low) / step).round() * step + low - plain).square().mean()
    assert (dequantised(weight, "int4") - weight).square().mean() < 0.97 * naive


def test_numbers_that_were_rounded_in_the_same_groups_stay_on_their_steps() -> None:
    values = torch.randint(0, 16, (8, 4, GROUP), generator=torch.Generator().manual_seed(1))
    values[..., 0], values[..., 1] = 0, 15  # as in Q4_1, whose ends are the extremes
    step, low = normal(8, 4, 1).abs() + 0.1, normal(8, 4, 1, seed=2)
    found, _, _ = round_to_int4((values * step + low).flatten(1))
    assert torch.equal(found, values.flatten(1).to(torch.uint8))


def test_weights_that_are_all_alike_stay_finite() -> None:
    for weight in (torch.zeros(16, 64), torch.full((16, 64), 0.5)):
        for kind in QUANTISED:
            torch.testing.assert_close(dequantised(weight, kind), weight, rtol=5e-3, atol=1e-6)


def rounded_copy(base: Path, folder: Path, kind: str) -> Path:
    """Copy a checkpoint with the numbers that stand for its weights when it is quantised."""
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = dequantised(tensor, "int8" if "embed" in name else kind)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def next_logits(model: Any, adapter: str | None, adapters: Mapping[str, Path]) -> Tensor:
    overheard: list[Tensor] = []
    forward = model.forward

    def record(*arguments: Any) -> Tensor:
        logits = forward(*arguments)
        overheard.append(logits)
        return logits

    model.forward = record
    engine = Engine(model, EngineLimits(slots=1))
    for name, path in adapters.items():
        engine.load(name, path)
    run(engine, [GenerateRequest(PROMPT, max_tokens=1, adapter=adapter)])
    model.forward = forward
    return overheard[-1][0]


@pytest.mark.parametrize("adapter", [None, "wide", "narrow"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_model_answers_as_its_rounded_weights_do(
    base: Path, adapters: Mapping[str, Path], tmp_path: Path, kind: str, adapter: str | None
) -> None:
    reference = load_model(rounded_copy(base, tmp_path / "rounded", kind), "float32")
    expected = next_logits(reference, adapter, adapters)
    found = next_logits(load_model(base, kind), adapter, adapters)
    assert float((found - expected).square().mean().sqrt() / expected.std()) < 0.05


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_mixed_batch_answers_each_request_as_if_it_were_alone(
    base: Path, adapters: Mapping[str, Path], kind: str
) -> None:
    requests = [
        GenerateRequest((*PROMPT, number), max_tokens=12, adapter=adapter)
        for number in range(4)
        for adapter in (None, "wide", "narrow")
    ]

    def engine() -> Engine:
        made = Engine(load_model(base, kind), EngineLimits(slots=6))
        for name, path in adapters.items():
            made.load(name, path)
        return made

    alone = [run(engine(), [request])[0] for request in requests]
    together = engine()
    answers = run(together, requests, joining=2)
    assert answers == alone
    assert together.stats()["reused_tokens"] > 0  # the prompts begin alike
    assert len({tuple(answer) for answer in answers}) > 1


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_weights_take_little_more_than_their_bits(base: Path, kind: str) -> None:
    model = load_model(base, kind)
    assert isinstance(model, LlamaModel)
    assert model.facts.weights == kind
    assert model.facts.cache.dtype is torch.float32
    for site in model.sites:
        assert site.product is not None
        numbers = site.inputs * sum(site.outputs)
        bits = 8 + 16 / site.inputs if kind == "int8" else 5
        assert site.product.nbytes * 8 == numbers * bits


@pytest.mark.parametrize("kind", QUANTISED)
def test_another_base_model_is_noticed_before_an_adapter_serves(
    base: Path, adapters: Mapping[str, Path], tmp_path: Path, kind: str
) -> None:
    adapter = shutil.copytree(adapters["wide"], tmp_path / "adapter")
    logits = next_logits(load_model(base, "float32"), "wide", adapters)
    tokens = logits.topk(16).indices
    probe = Probe(
        [], list(PROMPT), tokens.tolist(), logits[tokens].tolist(), float(logits.std()), [], []
    )
    Parity("float32", [probe]).save(adapter)
    Engine(load_model(base, kind), EngineLimits(slots=1)).load("own", adapter)

    other = shutil.copytree(base, tmp_path / "other")
    tensors = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for tensor in tensors.values():
        tensor.copy_(
            tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)
        )
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AdapterRefused, match="answer otherwise than after training"):
        Engine(load_model(other, kind), EngineLimits(slots=1)).load("own", adapter)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_base_that_fits_no_groups_or_is_of_another_kind_is_refused_by_name(
    base: Path, tmp_path: Path, kind: str
) -> None:
    other = shutil.copytree(base, tmp_path / "other")
    config = json.loads((base / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
    with pytest.raises(ModelRefused, match=f"intermediate_size .* is 50: weights in {kind} need"):
        load_model(other, kind)
    (other / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(ModelRefused, match=f"weights in {kind} are served for llama, mistral"):
        load_model(other, kind)


def test_the_fastest_format_that_keeps_the_loss_is_chosen(base: Path) -> None:
    measured = [
        MeasuredWeights("float32", 3.0, 0.05),
        MeasuredWeights("bfloat16", 3.02, 0.03),
        MeasuredWeights("int8", 3.04, 0.01),
        MeasuredWeights("int4", float("nan"), 0.001),
    ]
    assert fastest(measured).weights == "bfloat16"
    found = measured_weights(base)
    assert [one.weights for one in found] == ["float32", "bfloat16", "int8", "int4"]
    assert all(one.loss > 0 and one.step_s > 0 for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "auto"])
def test_a_replica_serves_the_format_that_it_is_given(
    start_replica: StartReplica, weights: str
) -> None:
    async def served() -> tuple[str, list[int]]:
        async with start_replica("--weights", weights) as process:
            stream = process.line.generate(GenerateRequest(PROMPT, max_tokens=4))
            return process.line.facts.dtype, await stream.read_all()

    dtype, tokens = asyncio.run(served())
    assert dtype in ({"int4"} if weights == "int4" else {"float32", "bfloat16", "int8", "int4"})
    assert len(tokens) == 4


@pytest.mark.parametrize("kind", QUANTISED)
def test_dot_products_of_the_processor_change_no_bit(kind: str, compiled: Kernels) -> None:
    made = Int8Product if kind == "int8" else Int4Product
    weight, x = normal(64, 96), normal(15, 96, seed=2)
    assert torch.equal(made(weight, compiled)(x), made(weight, kernels(may_dot=False))(x))
