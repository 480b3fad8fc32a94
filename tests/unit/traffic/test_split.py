"""A split in whole percent: each deployment gets its share, and each routing key stays at its deployment."""

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from tuneship.traffic.split import DRAWS, Share, TrafficSplit, draw_of_key, split_of


@st.composite
def splits(draw: st.DrawFn) -> TrafficSplit:
    """Draw 1 to 10 members whose shares add up to 100."""
    cuts = sorted(draw(st.lists(st.integers(0, 100), max_size=9)))
    bounds = [0, *cuts, 100]
    shares = [high - low for low, high in pairwise(bounds)]
    names = draw(st.permutations([f"dep_{number:02}" for number in range(len(shares))]))
    return TrafficSplit(tuple(Share(*one) for one in zip(names, shares, strict=True)))


@given(splits())
def test_every_draw_has_one_answer_and_each_share_is_exact(split: TrafficSplit) -> None:
    counted = Counter(split.choose(draw) for draw in range(0, DRAWS, 100))
    assert counted == {
        one.deployment_id: one.traffic_percentage for one in split.shares if one.traffic_percentage
    }


@settings(max_examples=10)
@given(splits(), st.integers())
def test_ten_thousand_callers_fall_within_binomial_bounds(split: TrafficSplit, salt: int) -> None:
    counted = Counter(
        split.choose(draw_of_key("cep_1", f"{salt}-{number}")) for number in range(DRAWS)
    )
    for share in split.shares:
        low, high = binom.interval(1 - 1e-9, DRAWS, share.traffic_percentage / 100)
        assert low <= counted[share.deployment_id] <= high


@given(st.integers(0, 100), st.integers(0, 100), st.text(max_size=30))
def test_a_shift_of_two_moves_only_keys_at_the_boundary(before: int, after: int, key: str) -> None:
    draw = draw_of_key("cep_1", key)

    def chosen(share: int) -> str:
        return TrafficSplit((Share("dep_a", 100 - share), Share("dep_b", share))).choose(draw)

    low, high = sorted((100 - before, 100 - after))
    moved = low * 100 <= draw < high * 100
    assert (chosen(before) != chosen(after)) == moved


@given(st.text(max_size=50))
def test_a_key_is_stable_and_bound_to_its_endpoint(key: str) -> None:
    assert draw_of_key("cep_1", key) == draw_of_key("cep_1", key)
    assert 0 <= draw_of_key("cep_1", key) < DRAWS


def test_known_keys_keep_their_draw_over_releases() -> None:
    assert [draw_of_key("cep_1", key) for key in ("a", "b")] == [8027, 6890]
    assert draw_of_key("cep_1", "a", "rollout-1") == draw_of_key("cep_1", "a", "rollout-1")


def test_draws_of_two_rollouts_are_independent() -> None:
    keys = [f"key {number}" for number in range(1_000)]
    salts = [None, "rollout-1", "rollout-2"]
    draws = [[draw_of_key("cep_1", key, salt) for key in keys] for salt in salts]
    for one, other in combinations(draws, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("shares", "is_divided"), [((100,), False), ((100, 0), False), ((99, 1), True)]
)
def test_a_split_is_divided_where_several_deployments_have_traffic(
    shares: tuple[int, ...], is_divided: bool
) -> None:
    split = TrafficSplit(tuple(Share(f"dep_{place}", one) for place, one in enumerate(shares)))
    assert split.is_divided == is_divided


@pytest.mark.parametrize("total", [0, 99, 101])
def test_weights_that_do_not_sum_to_100_are_no_split(total: int) -> None:
    with pytest.raises(ValueError, match="sum to 100"):
        split_of([{"id": "dep_a", "traffic_percentage": total}])


@pytest.mark.parametrize("draw", [DRAWS, DRAWS + 1])
def test_a_draw_beyond_the_last_has_no_answer(draw: int) -> None:
    with pytest.raises(ValueError, match="draw"):
        TrafficSplit((Share("dep_a", 100),)).choose(draw)
