"""The compiled attention of decoding tokens, beside torch's on the same cache, and the threads that share products."""

import time
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from tuneship.serving.batch import FlatBatch
from tuneship.serving.kernels import integer_kernels
from tuneship.serving.kernels.integer_kernels import Kernels, kernels
from tuneship.serving.kernels.quantised import Int4Product
from tuneship.serving.kv_cache import CacheShape, SlotCache
from tuneship.serving.models.attention import AttentionPlan

# Query heads, heads of keys and values, their width, and the positions of the tokens.
SHAPES = [
    (9, 3, 64, (90, 3, 0, 7, 8, 149, 31, 32)),
    (4, 4, 32, (36,)),
    (8, 1, 128, (33, 64)),
]


@dataclass(frozen=True)
class Step:
    """Decoding tokens at some positions, with a cache that holds numbers everywhere."""

    qkv: Tensor
    rotation: Tensor
    batch: FlatBatch
    cache: SlotCache
    heads: int

    def __post_init__(self) -> None:
        self.cache.prepare()

    @property
    def plan(self) -> AttentionPlan:
        return AttentionPlan(self.qkv.shape[-1] ** -0.5)

    def by_torch(self) -> Tensor:
        heads = self.heads + self.cache.shape.kv_heads
        pairs = torch.view_as_complex(self.qkv[:, :heads].unflatten(-1, (-1, 2)))
        pairs.mul_(self.rotation)
        return self._attend(None)

    def by_kernel(self, compiled: Kernels) -> Tensor:
        given = self.qkv, self.rotation, self.batch
        return self._attend(partial(compiled.attend, *given, scale=self.plan.scale))

    def _attend(self, decode: "partial[Tensor] | None") -> Tensor:
        queries, rest = self.qkv[:, : self.heads], self.qkv[:, self.heads :]
        return self.cache.attend(0, queries, rest, self.batch, self.plan, decode)


def step(shape: tuple[int, int, int, tuple[int, ...]], tokens: slice = slice(None)) -> Step:
    """The step of a shape, or only some of its tokens, which then are the same numbers in the same slots."""
    heads, kv_heads, dim, positions = shape
    count, length = len(positions), max(positions) + 3
    numbers = torch.Generator().manual_seed(1)
    cache = SlotCache(CacheShape(1, kv_heads, dim, torch.float32), count, length)
    cache.resize(count, length)
    cache._layers[0].keys.normal_(generator=numbers)
    cache._layers[0].values.normal_(generator=numbers)
    qkv = torch.randn(count, heads + 2 * kv_heads, dim, generator=numbers)
    angles = torch.rand(count, 1, dim // 2, generator=numbers) * 6
    rotation = torch.polar(torch.ones_like(angles), angles)
    slots = torch.arange(count).flip(0)[tokens]
    chosen = torch.tensor(positions)[tokens]
    batch = FlatBatch(
        tokens=torch.zeros(len(slots), dtype=torch.long),
        positions=chosen,
        slots=slots,
        logit_indices=torch.arange(len(slots)),
        decode_slots=tuple(slots.tolist()),
        prefills=(),
        length=int(chosen.max()) + 1,
    )
    return Step(qkv[tokens].clone(), rotation[tokens].contiguous(), batch, cache, heads)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = kernels()
    if found is None:
        pytest.skip("our kernels do not run on this machine")
    monkeypatch.setattr(found, "_share_at", 0.0)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_decoding_tokens_is_torchs(
    shape: tuple[int, int, int, tuple[int, ...]], compiled: Kernels
) -> None:
    expected, found = step(shape), step(shape)
    torch.testing.assert_close(found.by_kernel(compiled), expected.by_torch(), rtol=0, atol=1e-5)
    for name in ("keys", "values"):
        stored, wanted = (getattr(one.cache._layers[0], name) for one in (found, expected))
        torch.testing.assert_close(stored, wanted, rtol=0, atol=1e-5)


def test_attention_of_a_token_has_the_same_bits_whatever_is_beside_it(compiled: Kernels) -> None:
    together = step(SHAPES[0]).by_kernel(compiled)
    for place in range(len(together)):
        alone = step(SHAPES[0], slice(place, place + 1)).by_kernel(compiled)
        assert torch.equal(alone[0], together[place])


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_attention_from_a_token_that_is_not_finite_is_not_and_harms_no_other(
    fault: float, compiled: Kernels
) -> None:
    expected = step(SHAPES[0]).by_kernel(compiled)
    faulty = step(SHAPES[0])
    faulty.qkv[1] = fault
    found = faulty.by_kernel(compiled)
    assert not found[1].isfinite().any()
    assert torch.equal(found[2:], expected[2:])


def test_attention_does_not_see_what_lies_behind_a_token(compiled: Kernels) -> None:
    expected = step(SHAPES[0]).by_kernel(compiled)
    stale = step(SHAPES[0])
    for slot, position in zip(stale.batch.decode_slots, SHAPES[0][3], strict=True):
        stale.cache._layers[0].keys_by_position[slot, position:] = float("nan")
        stale.cache._layers[0].values_by_position[slot, position:] = float("nan")
    assert torch.equal(stale.by_kernel(compiled), expected)


def test_threads_help_with_products_of_few_tokens_and_change_no_bit(
    compiled: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    numbers = torch.Generator().manual_seed(1)
    product = Int4Product(torch.randn(1536, 576, generator=numbers), compiled)
    x = torch.randn(1, 576, generator=numbers)
    expected = product(x)
    monkeypatch.setattr(Kernels, "few_token_threads", 3)
    monkeypatch.setattr(integer_kernels, "LONG_WAIT_CYCLES", 1 << 60)
    assert all(torch.equal(product(x), expected) for _ in range(30))
    assert len(compiled._gates) >= 2


def test_threads_help_with_attention_and_change_no_bit(
    compiled: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    expected = step(SHAPES[0]).by_kernel(compiled)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(integer_kernels, "MIN_SHARED_NUMBERS", 0)
    monkeypatch.setattr(integer_kernels, "LONG_WAIT_CYCLES", 1 << 60)
    for _ in range(30):
        assert torch.equal(step(SHAPES[0]).by_kernel(compiled), expected)
    assert compiled._shared[integer_kernels.FUNCTION] == compiled._attend
    assert len(compiled._gates) >= 2


def test_products_are_not_shared_for_a_while_where_a_helping_thread_has_no_core(
    compiled: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Int4Product(torch.ones(1536, 576), compiled)
    monkeypatch.setattr(Kernels, "few_token_threads", 2)
    monkeypatch.setattr(integer_kernels, "LONG_WAIT_CYCLES", -1)
    monkeypatch.setattr(integer_kernels, "PAUSE_S_PER_CYCLE", 1e9)
    product(torch.ones(1, 576))
    assert compiled._share_at > time.monotonic()
    shared = compiled._shared[:]
    product(torch.ones(1, 576))
    assert compiled._shared[:] == shared
