"""Which token is taken from given logits."""

import math
from collections import Counter

import pytest
import torch

from tuneship.serving.sampler import choose

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def pick(logits: torch.Tensor, temperature: float, top_p: float, draw: float) -> int:
    return choose(logits, [temperature], [top_p], [draw])[1][0]


def test_temperature_zero_takes_the_likeliest_token_whatever_is_drawn() -> None:
    assert {pick(LOGITS, 0, 1, draw) for draw in (0.0, 0.5, 0.999)} == {0}


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


def test_a_row_of_nonsense_is_told_apart_from_its_neighbours() -> None:
    highest, _ = choose(torch.tensor([[1.0, 2.0], [math.nan, 2.0]]), [0, 0], [1, 1], [0, 0])
    assert highest[0] == 2
    assert math.isnan(highest[1])
