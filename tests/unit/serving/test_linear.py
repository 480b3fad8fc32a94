"""Products with weights laid out once give the same numbers whichever library computes them."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from tuneship.serving.models import linear
from tuneship.serving.models.linear import (
    SMALL_BYTES,
    PackedLibrary,
    PackedLinear,
    Packing,
    Product,
    pack_layers,
    prefers_packed,
    product_seconds,
)

SMALL, LARGE = (256, 128), (1024, 520)
assert 2 * LARGE[0] * LARGE[1] > SMALL_BYTES


@pytest.fixture(params=[True, False], ids=["laid out", "plain"])
def packing(request: pytest.FixtureRequest) -> Packing:
    """Run both layouts, whichever is the faster one on this machine."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    return Packing(is_faster=request.param)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 32, 33, 57, 64])
def test_a_product_is_that_of_torch(
    rows: int, dtype: torch.dtype, shared: bool, shape: tuple[int, int], packing: Packing
) -> None:
    # The service measures this; here the layout is forced.
    has_format = dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if packing.is_faster and not has_format:
        pytest.skip("oneDNN has no products in bfloat16 for this processor")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    residual = torch.randn(rows, shape[0], generator=torch.Generator().manual_seed(3)).to(dtype)
    kept = residual.clone()
    weighed = Product(weight, shared=shared, packing=packing)
    expected = F.linear(x.double(), weight.double())
    exactness = 2e-2 if dtype is torch.bfloat16 else 1e-5
    for found, wanted in (
        (weighed(x), expected),
        (weighed.onto(residual, x), expected + residual),
    ):
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), wanted, rtol=exactness, atol=30 * exactness)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_larger_weight_is_another_products(shape: tuple[int, int], packing: Packing) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, delta = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    x = torch.randn(40, shape[1], generator=generator)
    before = Product(weight, packing=packing)
    own = before(x)
    larger = before.plus(delta)
    torch.testing.assert_close(larger(x), F.linear(x, weight + delta), rtol=1e-4, atol=1e-3)
    assert torch.equal(before(x), own)
    assert larger.nbytes == before.nbytes == weight.nbytes


def test_products_of_many_tokens_have_few_sizes() -> None:
    """Each new size is compiled, and only a limited number of compiled ones is kept."""
    for tokens in range(1, 5000):
        size = linear._padded_count(tokens)
        assert tokens <= size <= (tokens if tokens <= linear.UNPADDED_TOKENS else 1.125 * tokens)
    sizes = {linear._padded_count(tokens) for tokens in range(1, 2049)}
    assert len(sizes) <= linear.UNPADDED_TOKENS + 6 * 8 + 1


def test_the_weight_that_was_copied_is_not_kept(packing: Packing) -> None:
    weight = torch.randn(LARGE)
    gone = weakref.ref(weight)
    product_of_it = Product(weight, packing=packing)
    del weight
    assert gone() is None
    assert product_of_it(torch.ones(1, LARGE[1])).isfinite().all()


@pytest.mark.parametrize("most", [0, 1 << 30])
def test_large_layers_of_a_model_are_replaced_where_that_is_faster(
    packing: Packing, most: int
) -> None:
    """The last layer's weight is the embedding, too, and is copied up to this many bytes."""
    layout = packing.is_faster
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(*LARGE),
            torch.nn.Linear(LARGE[1], LARGE[0]),
            torch.nn.Linear(LARGE[0], SMALL[1]),
            torch.nn.Linear(SMALL[1], LARGE[1]),
            torch.nn.Linear(LARGE[1], LARGE[0], bias=False),
        )
    model[4].weight = model[0].weight
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        expected = model(ids)
        pack_layers(model, replace(packing, shared_bytes=most))
        found = model(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    replaced = [isinstance(layer, PackedLinear) for layer in model]
    assert replaced == [False, layout, False, False, layout]
    assert model[4].weight.is_mkldnn == bool(layout and most > 0)
    assert model[4].weight.is_mkldnn or model[4].weight.data_ptr() == model[0].weight.data_ptr()


def test_without_onednn_products_are_plain() -> None:
    def missing(_: object) -> torch.Tensor:
        raise RuntimeError("not built in")

    absent = PackedLibrary(pack=missing)
    assert not prefers_packed(torch.float32, absent)
    assert 0 < product_seconds(torch.float32, absent) < float("inf")


def test_a_library_with_other_results_is_not_used() -> None:
    wrong = PackedLibrary(lambda weight: weight, lambda x, weight: 1.01 * (x @ weight.t()))
    assert not prefers_packed(torch.float32, wrong)
