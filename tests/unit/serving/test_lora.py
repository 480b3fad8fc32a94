"""Deltas of many adapters over one site, against the plain product of each row with its own matrices."""

import random

import pytest
import torch

from tuneship.serving.adapters import AdapterRefused, Matrices
from tuneship.serving.lora import SPARE_SLOTS, Lora, Site

SITES = (
    Site(("q", "k"), 6, (8, 4), (None, None)),
    Site(("down",), 5, (6,), (None,)),
)


def matrices(seed: int, rank: int, *modules: str) -> dict[str, Matrices]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (6, 8), "k": (6, 4), "down": (5, 6)}
    return {
        module: Matrices(
            torch.randn(rank, shapes[module][0], generator=generator),
            torch.randn(rank, shapes[module][1], generator=generator),
        )
        for module in modules
    }


def expected(site: Site, x: torch.Tensor, pairs: dict[str, Matrices]) -> torch.Tensor:
    parts = [
        x @ pairs[module].a.t() @ pairs[module].b if module in pairs else x.new_zeros(len(x), width)
        for module, width in zip(site.modules, site.outputs, strict=True)
    ]
    return torch.cat(parts, dim=1)


def check(
    lora: Lora, loaded: dict[str, dict[str, Matrices]], rows: list[str | None], prompt: int = 3
) -> None:
    """Check a step of these rows, followed by a prompt of this many tokens for the last row's adapter."""
    joiner = rows[-1]
    for name in (*rows, joiner):
        if name:
            lora.acquire(name)
    routes = lora.route(rows, [(joiner, len(rows), len(rows) + prompt)])
    for number, site in enumerate(SITES):
        x = torch.randn(len(rows) + prompt, site.inputs)
        out = torch.ones(len(x), sum(site.outputs))
        lora.add(number, x, out, routes)
        owners = [*rows, *[joiner] * prompt]
        wanted = torch.cat(
            [
                expected(site, x[n : n + 1], loaded[name] if name else {})
                for n, name in enumerate(owners)
            ]
        )
        # Sums of hundreds of products in another order.
        torch.testing.assert_close(out, wanted + 1, rtol=1e-4, atol=1e-4)
    for name in (*rows, joiner):
        if name:
            lora.release(name)


@pytest.fixture
def loaded() -> dict[str, dict[str, Matrices]]:
    """Load more adapters than there are spare slots, of three ranks, some for only a part of the modules."""
    choices = [("q", "k", "down"), ("q",), ("k", "down")]
    return {
        str(n): matrices(n, (2, 4, 8)[n // 3 % 3], *choices[n % 3]) for n in range(SPARE_SLOTS + 20)
    }


@pytest.fixture
def lora(loaded: dict[str, dict[str, Matrices]]) -> Lora:
    lora = Lora(SITES, torch.float32)
    for name, pairs in loaded.items():
        lora.load(name, pairs)
    return lora


def test_every_row_gets_its_own_delta_whichever_adapters_ran_before(
    lora: Lora, loaded: dict[str, dict[str, Matrices]]
) -> None:
    draws = random.Random(1)  # noqa: S311 (which rows, not secrets)
    names: list[str | None] = [*loaded, None]
    for _ in range(60):
        few = draws.sample(names, draws.randint(1, 12))
        check(lora, loaded, draws.choices(few, k=draws.randint(1, 16)))
    assert len(lora) == len(loaded)


def test_rows_of_one_adapter_and_rows_that_all_have_one(
    lora: Lora, loaded: dict[str, dict[str, Matrices]]
) -> None:
    check(lora, loaded, [*"0000"])
    check(lora, loaded, [*"30112023"])


def test_a_prompt_that_is_long_enough_for_products_beside_rows_of_others(
    lora: Lora, loaded: dict[str, dict[str, Matrices]]
) -> None:
    check(lora, loaded, [*"3011202", None, "3"], prompt=lora._min_beside)
    check(lora, loaded, [*"3011202", None, "3"], prompt=lora._min_beside - 1)


def test_deltas_in_half_precision_are_as_exact_as_the_format() -> None:
    """The additions of many terms are kept in float32 until they are complete."""
    site = Site(("wide",), 2000, (24,), (None,))
    generator = torch.Generator().manual_seed(1)
    pairs = [
        Matrices(torch.randn(8, 2000, generator=generator), torch.randn(8, 24, generator=generator))
        for _ in range(3)
    ]
    lora = Lora((site,), torch.bfloat16)
    for n, pair in enumerate(pairs):
        lora.load(str(n), {"wide": pair})
        lora.acquire(str(n))
    x, owners = torch.randn(5, 2000, generator=generator).bfloat16(), (2, 0, 1, 1, 0)
    out = torch.zeros(5, 24, dtype=torch.bfloat16)
    lora.add(0, x, out, lora.route([str(n) for n in owners], []))
    exact = torch.stack(
        [
            row.double() @ pairs[n].a.bfloat16().double().t() @ pairs[n].b.bfloat16().double()
            for row, n in zip(x, owners, strict=True)
        ]
    )
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error < 2 * torch.finfo(torch.bfloat16).eps


def test_more_adapters_than_spare_slots_run_at_once(
    lora: Lora, loaded: dict[str, dict[str, Matrices]]
) -> None:
    check(lora, loaded, [*loaded])


def test_an_adapter_of_rank_one_that_lost_its_slot_is_the_same_when_it_comes_back() -> None:
    lora, loaded = Lora(SITES, torch.float32), {}
    for n in range(SPARE_SLOTS + 8):
        loaded[str(n)] = matrices(n, 1, "down")
        lora.load(str(n), loaded[str(n)])
    for name in [*loaded, *loaded]:
        check(lora, loaded, [name])


def test_the_matrices_of_an_adapter_are_in_one_place_only() -> None:
    lora = Lora(SITES, torch.float32)
    names = [str(n) for n in range(SPARE_SLOTS + 10)]
    for n, name in enumerate(names):
        lora.load(name, matrices(n, 4, "q", "k", "down"))
    for name in names:
        lora.acquire(name)
        lora.release(name)
    one = sum(t.numel() for p in matrices(0, 4, "q", "k", "down").values() for t in (p.a, p.b))
    at_rest = [
        tensor
        for sites in lora._registry.values()
        for members in sites.values()
        for pair in members.values()
        for tensor in (pair.a, pair.b)
    ]
    in_slots = [tensor for stack in lora._stacks for tensor in (stack._a, stack._b)]
    assert sum(tensor.numel() for tensor in (*at_rest, *in_slots)) == len(names) * one


def test_a_site_that_no_adapter_changes_takes_no_memory() -> None:
    lora = Lora(SITES, torch.float32)
    lora.load("one", matrices(1, 4, "q"))
    lora.acquire("one")
    assert [stack._a.numel() for stack in lora._stacks] == [8 * 6, 0]


def test_an_adapter_that_was_unloaded_is_gone_and_its_slot_is_used_again(lora: Lora) -> None:
    lora.acquire("0")
    lora.release("0")
    assert lora.unload("0")
    assert "0" not in lora
    assert not lora.unload("0")
    lora.acquire("1")
    assert lora._residents == ["1"]


def test_a_large_rank_goes_with_its_adapter() -> None:
    lora = Lora(SITES, torch.float32)
    loaded = {"small": matrices(1, 2, "q", "down"), "large": matrices(2, 64, "q", "k")}
    for name, pairs in loaded.items():
        lora.load(name, pairs)
    check(lora, loaded, ["small", "large"])
    width = 2 * 6 + 12
    assert lora.bytes_allocated == 2 * 64 * (width + 5 + 6) * 4
    lora.unload("large")
    assert lora.bytes_allocated == 2 * 2 * (width + 5 + 6) * 4
    check(lora, {"small": loaded["small"]}, ["small", None])


def test_memory_is_counted_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = Lora(SITES, torch.float32)
    lora.load("a", matrices(1, 2, "q"))
    check(lora, {"a": matrices(1, 2, "q")}, ["a"])
    monkeypatch.setattr("tuneship.serving.lora.free_memory", lambda: 20_000)
    with pytest.raises(AdapterRefused, match="rank 500, for which the free memory is not enough"):
        lora.load("b", matrices(2, 500, "q"))
    assert "b" not in lora
    lora.load("b", matrices(2, 4, "q"))
    # No more slots are made than the free memory has room for.
    monkeypatch.setattr("tuneship.serving.lora.free_memory", lambda: 0)
    check(lora, {"b": matrices(2, 4, "q")}, ["b"])
    assert lora.bytes_allocated == 4 * (2 * 6 + 12) * 4


def test_slots_for_a_larger_rank_are_made_only_where_all_of_them_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora, loaded = Lora(SITES, torch.float32), dict[str, dict[str, Matrices]]()
    for n in range(4):
        loaded[str(n)] = matrices(n, 2, "q", "down")
        lora.load(str(n), loaded[str(n)])
    check(lora, loaded, ["0", "1", "2", "3"])
    loaded["large"] = matrices(9, 64, "q", "down")
    lora.load("large", loaded["large"])
    rank_bytes = (2 * 6 + 12 + 5 + 6) * 4
    # Room for twice the slots, and as much again, but not of the larger rank.
    monkeypatch.setattr("tuneship.serving.lora.free_memory", lambda: 2 * 8 * 2 * rank_bytes)
    check(lora, loaded, ["large"])
    assert lora.bytes_allocated == 4 * 64 * rank_bytes
    # The larger rank goes with the adapter's slot, and what was in the slots is the same.
    monkeypatch.setattr("tuneship.serving.lora.free_memory", lambda: 0)
    for name in "0123":
        check(lora, loaded, [name])
    assert lora.bytes_allocated == 4 * 2 * rank_bytes
    check(lora, loaded, ["3", "1", "0", "2"])
    check(lora, loaded, ["large", "2"])


def test_a_load_counts_the_slots_that_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = Lora(SITES, torch.float32)
    loaded = {str(n): matrices(n, 2, "q") for n in range(4)}
    for name, pairs in loaded.items():
        lora.load(name, pairs)
    check(lora, loaded, [*loaded])
    for name in loaded:
        lora.unload(name)
    # Enough for one slot of this rank, and four would be made.
    monkeypatch.setattr("tuneship.serving.lora.free_memory", lambda: 2 * 2 * 64 * (2 * 6 + 12) * 4)
    with pytest.raises(AdapterRefused, match="the free memory is not enough"):
        lora.load("large", matrices(9, 64, "q"))


def test_adapters_that_run_at_once_get_no_more_slots_than_the_free_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora = Lora(SITES, torch.float32)
    loaded = {str(n): matrices(n, 2, "q") for n in range(3)}
    for name, pairs in loaded.items():
        lora.load(name, pairs)
    monkeypatch.setattr("tuneship.serving.lora.free_memory", lambda: 0)
    check(lora, loaded, [*loaded])
    assert lora.bytes_allocated == 3 * 2 * (2 * 6 + 12) * 4
