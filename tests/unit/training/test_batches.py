"""Tests of the order of the rows, and of the rectangles that they form."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tuneship.training.examples.batches import collate, epoch_batches, micro_batches
from tuneship.training.examples.tokenized_examples import TokenizedExamples
from tuneship.training.schedule import learning_rate


@given(
    count=st.integers(1, 200),
    size=st.integers(1, 50),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_an_epoch_holds_every_row_once(count: int, size: int, seed: int, epoch: int) -> None:
    batches = epoch_batches(np.arange(count), size, seed=seed, epoch=epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(count))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)


def test_the_order_follows_from_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return np.concatenate(epoch_batches(np.arange(50), 8, seed=seed, epoch=epoch)).tolist()

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60), most=st.integers(1, 100))
def test_micro_batches_hold_every_row_once_within_the_limit(lengths: list[int], most: int) -> None:
    sizes = np.array(lengths)
    batches = list(micro_batches(np.arange(len(sizes)), sizes, most))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(sizes)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * sizes[batch].max() <= most


def test_a_rectangle_predicts_each_learnt_token_from_the_place_before_it() -> None:
    rows = TokenizedExamples(
        np.array([5, 6, 7, 8, 9], dtype=np.int32),
        np.array([True, False, True, False, True]),
        np.array([0, 3, 5]),
    )
    batch = collate(rows, np.array([1, 0]))
    assert batch.tokens.tolist() == [[8, 9, 0], [5, 6, 7]]
    assert batch.token_positions.tolist() == [0, 1, 3, 4, 5]
    assert batch.logit_positions.tolist() == [0, 4], "a first token is never predicted"
    assert batch.targets.tolist() == [9, 7]


def test_the_rate_climbs_to_its_peak_and_falls_to_the_last_step() -> None:
    rates = [learning_rate(step, peak=1.0, warmup_steps=2, total_steps=6) for step in range(1, 7)]
    assert rates == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert learning_rate(1, peak=1.0, warmup_steps=0, total_steps=4) == 1.0
