"""A routing key with much of an endpoint's traffic is found within two minutes, and small ones never are."""

import random

import pytest

from tuneship.traffic.large_keys import KEPT_KEYS, MOST_KEYS, LargeKeys

START = 1_790_000_040.0


def minute_of(
    keys: LargeKeys, number: int, requests: list[int | None], endpoint: str = "cep_a"
) -> frozenset[int]:
    """Count the requests of one minute, and return the large keys that the last one met."""
    large = frozenset[int]()
    for place, key in enumerate(requests):
        large = keys.count(endpoint, key, START + 60 * number + 59 * place / len(requests))
    return large


def traffic(dice: random.Random, shares: dict[int, float], number: int = 300) -> list[int | None]:
    """Requests of the given keys, and of callers who come once."""
    drawn = dice.choices([*shares, None], [*shares.values(), 1 - sum(shares.values())], k=number)
    return [dice.randrange(10**6, 10**9) if key is None else key for key in drawn]


@pytest.mark.parametrize("share", [0.04, 0.1, 0.5])
def test_a_key_above_two_per_cent_is_large_within_two_minutes(share: float) -> None:
    keys, dice = LargeKeys(), random.Random(1)  # noqa: S311 - traffic of a test
    for number in range(2):
        assert minute_of(keys, number, traffic(dice, {7: share})) == frozenset()
    assert minute_of(keys, 2, traffic(dice, {7: share})) == {7}


def test_a_key_that_begins_in_the_middle_is_large_in_the_next_minute() -> None:
    keys, dice = LargeKeys(), random.Random(2)  # noqa: S311 - traffic of a test
    for number in range(15):
        assert not minute_of(keys, number, traffic(dice, {}))
    assert not minute_of(keys, 15, traffic(dice, {7: 0.5}))
    assert minute_of(keys, 16, traffic(dice, {7: 0.5})) == {7}


def test_conversations_and_a_few_requests_in_all_have_no_large_keys() -> None:
    keys, dice = LargeKeys(), random.Random(3)  # noqa: S311 - traffic of a test
    for number in range(12):
        assert not minute_of(keys, number, [dice.randrange(200) for _ in range(300)])
    few = LargeKeys()
    # 490 requests in ten minutes.
    assert not any(minute_of(few, number, [7] * 49) for number in range(12))


def test_a_key_without_requests_for_ten_minutes_is_no_longer_large() -> None:
    keys, dice = LargeKeys(), random.Random(4)  # noqa: S311 - traffic of a test
    for number in range(3):
        minute_of(keys, number, traffic(dice, {7: 0.3}))
    found = [bool(minute_of(keys, number, traffic(dice, {}))) for number in range(3, 16)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (True, False)


def test_a_large_key_is_found_among_more_keys_than_are_kept() -> None:
    keys, dice = LargeKeys(), random.Random(5)  # noqa: S311 - traffic of a test
    for number in range(2):
        minute_of(keys, number, traffic(dice, {7: 0.03, 8: 0.03}, 20_000))
    assert minute_of(keys, 2, traffic(dice, {})) == {7, 8}
    [counts] = keys._endpoints.values()
    assert len(counts.now.by_key) <= MOST_KEYS
    assert all(len(minute.by_key) <= KEPT_KEYS for minute in counts.past)


def test_endpoints_have_keys_of_their_own_and_idle_ones_are_forgotten() -> None:
    keys = LargeKeys()
    for number in range(2):
        minute_of(keys, number, [7] * 500, "cep_a")
    assert minute_of(keys, 2, [7], "cep_a") == {7}
    assert minute_of(keys, 2, [7], "cep_b") == frozenset()
    minute_of(keys, 13, [None], "cep_c")
    assert set(keys._endpoints) == {"cep_c"}


def test_a_clock_that_is_set_back_leaves_nothing_of_a_time_to_come() -> None:
    keys = LargeKeys()
    for number in (5, 6):
        minute_of(keys, number, [7] * 500)
    assert minute_of(keys, 0, [7] * 10) == frozenset()
    assert minute_of(keys, 1, [7] * 10) == frozenset()
