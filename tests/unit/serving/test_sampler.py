"""Tests of which token is taken from given logits."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tuneship.serving.sampling.sampler import choose
from tuneship.serving.sequence import GREEDY_BELOW

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def pick(logits: torch.Tensor, temperature: float, top_p: float, draw: float) -> int:
    return choose(logits, [temperature], [top_p], [draw])[1][0]


def test_temperature_zero_takes_the_likeliest_token_whatever_is_drawn() -> None:
    assert {pick(LOGITS, 0, 1, draw) for draw in (0.0, 0.5, 0.999)} == {0}


@given(
    temperature=st.floats(5e-324, 2.0),
    logits=st.lists(
        st.floats(-1e4, 1e4, width=32, allow_subnormal=False), min_size=2, max_size=40, unique=True
    ),
    top_p=st.floats(0.01, 1.0),
    draw=st.floats(0.0, 1.0, exclude_max=True),
)
@example(temperature=5e-324, logits=[1.0, 2.0, -30.0], top_p=1.0, draw=0.99)
@example(temperature=1e-38, logits=[1.0, 2.0, -30.0], top_p=0.9, draw=0.99)
@example(temperature=1e-37, logits=[9e3, -1e4, 8e3], top_p=1.0, draw=0.5)
@example(temperature=GREEDY_BELOW, logits=[-1e4, 1e4], top_p=1.0, draw=0.99)
@example(temperature=1.0, logits=[1e4, -1e4], top_p=1.0, draw=1 - 2**-53)
@example(temperature=1.0, logits=[1e4, -1e4], top_p=0.9999999999999999, draw=1 - 2**-53)
def test_at_any_temperature_a_token_is_taken_that_the_exact_distribution_allows(
    temperature: float, logits: list[float], top_p: float, draw: float
) -> None:
    """Two logits closer than the temperature may both be taken. One that is 200 temperatures lower never is."""
    chosen = pick(torch.tensor([logits]), temperature, top_p, draw)
    assert max(logits) - logits[chosen] <= 200 * temperature
    if temperature < GREEDY_BELOW:
        assert logits[chosen] == max(logits)


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-40, 1e-38, 1e-37, 1e-20, 1e-7, 9e-7])
def test_temperatures_below_a_millionth_are_greedy_also_in_mixed_batches(
    temperature: float,
) -> None:
    rows = LOGITS.repeat(3, 1) * 100
    _, tokens = choose(rows, [0.7, temperature, 0.0], [1, 0.9, 1], [0.0, 0.999, 0.999])
    assert tokens == [0, 0, 0]


@pytest.mark.parametrize("top_p", [1.0, 0.9999])
def test_even_draws_give_the_tokens_their_probabilities(top_p: float) -> None:
    counts = Counter(pick(LOGITS, 1, top_p, (n + 0.5) / 1000) for n in range(1000))
    assert [counts[token] for token in range(4)] == pytest.approx([500, 300, 150, 50], abs=2)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert {pick(LOGITS, 1, top_p, n / 500) for n in range(500)} == kept


def test_a_nucleus_larger_than_the_first_candidates_is_still_exact() -> None:
    flat = torch.zeros(1, 200)
    assert len({pick(flat, 1, 0.5, n / 1000) for n in range(1000)}) == 100


@pytest.mark.parametrize("steepness", [0.0, 0.5, 1.0, 1.5, 3.0, 30.0])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999, 0.9999999])
def test_in_a_large_vocabulary_the_nucleus_is_that_of_the_whole_in_order(
    steepness: float, top_p: float
) -> None:
    shuffled = torch.randperm(50_000, generator=torch.Generator().manual_seed(1))
    logits = torch.empty(1, 50_000)
    logits[0, shuffled] = -steepness * torch.arange(1, 50_001).log()
    likely, order = logits[0].softmax(0).sort(descending=True, stable=True)
    mass = likely.cumsum(0)
    nucleus = mass[: int((mass < top_p).sum()) + 1]
    for draw in (0.0, 0.3, 0.99):
        place = int(torch.searchsorted(nucleus, draw * float(nucleus[-1]), right=True))
        assert pick(logits, 1, top_p, draw) == order[place]


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    def share_of_first(temperature: float) -> int:
        return sum(pick(LOGITS, temperature, 1, n / 200) == 0 for n in range(200))

    assert share_of_first(0.25) > share_of_first(1) > share_of_first(2)


def test_every_row_has_its_own_settings() -> None:
    _, tokens = choose(LOGITS.repeat(3, 1), [0, 1, 1], [1, 1, 0.4], [0.99, 0.99, 0.99])
    assert tokens == [0, 3, 0]


def test_a_row_of_nonsense_is_distinguished_from_its_neighbours() -> None:
    highest, _ = choose(torch.tensor([[1.0, 2.0], [math.nan, 2.0]]), [0, 0], [1, 1], [0, 0])
    assert highest[0] == 2
    assert math.isnan(highest[1])
