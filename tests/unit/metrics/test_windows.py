"""Windows count and merge, and no observation is lost between recorder and store."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneship.metrics.observations import Observation, RequestOutcome
from tuneship.metrics.recorder import Recorder, WindowKey
from tuneship.metrics.windows import MetricWindow

OBSERVATION = Observation("dep_a", "", 100.5, RequestOutcome.SUCCESS, 10.0, 3, 4)
OUTCOMES = st.sampled_from(list(RequestOutcome))


@st.composite
def windows(draw: st.DrawFn) -> MetricWindow:
    window = MetricWindow()
    for outcome, latency in draw(st.lists(st.tuples(OUTCOMES, st.integers(0, 10**6)), max_size=20)):
        window.add(replace(OBSERVATION, outcome=outcome, latency_ms=float(latency)))
    return window


def merged(*windows: MetricWindow) -> MetricWindow:
    total = MetricWindow()
    for window in windows:
        total.merge(window)
    return total


@given(windows(), windows(), windows())
def test_merging_is_associative_and_loses_nothing(
    one: MetricWindow, two: MetricWindow, three: MetricWindow
) -> None:
    left = merged(merged(one, two), three)
    assert left == merged(one, merged(two, three)) == merged(three, two, one)
    assert left.request_count == one.request_count + two.request_count + three.request_count


@pytest.mark.parametrize("outcome", [RequestOutcome.CANCELLED, RequestOutcome.REFUSED])
def test_a_call_without_an_answer_is_counted_apart_and_is_no_request(
    outcome: RequestOutcome,
) -> None:
    window = MetricWindow()
    window.add(replace(OBSERVATION, outcome=outcome))
    assert not window.is_empty
    expected = MetricWindow()
    setattr(expected, f"{outcome}_count", 1)
    assert window == expected


def test_callers_are_counted_once_by_how_their_requests_ended() -> None:
    window = MetricWindow()
    for outcome in RequestOutcome:
        for caller in (1, 2, 2):
            window.add(replace(OBSERVATION, outcome=outcome, caller=caller * len(outcome)))
    # This error has no known caller.
    window.add(replace(OBSERVATION, outcome=RequestOutcome.SERVER_ERROR))
    found = window.error_callers, window.cancelled_callers, window.refused_callers
    outcomes = RequestOutcome.SERVER_ERROR, RequestOutcome.CANCELLED, RequestOutcome.REFUSED
    assert found == tuple({len(outcome), 2 * len(outcome)} for outcome in outcomes)


def test_a_callers_number_is_the_same_in_one_process_and_another_in_the_next() -> None:
    one, two = Recorder(), Recorder()
    assert one.number_of("routing key k") == one.number_of("routing key k") < 2**32
    assert one.number_of("routing key k") != one.number_of("routing key l")
    assert [one.number_of(str(n)) for n in range(4)] != [two.number_of(str(n)) for n in range(4)]


def test_an_error_counts_as_request_and_has_no_latency() -> None:
    window = MetricWindow()
    window.add(replace(OBSERVATION, outcome=RequestOutcome.SERVER_ERROR))
    assert (window.request_count, window.error_count, sum(window.latencies.values())) == (1, 1, 0)


@pytest.mark.parametrize("outcome", RequestOutcome)
def test_a_request_of_a_batch_counts_like_all_others_and_has_no_latency(
    outcome: RequestOutcome,
) -> None:
    observation = replace(OBSERVATION, outcome=outcome, is_empty=True, caller=7, first_token_ms=2.0)
    usual, of_batch = MetricWindow(), MetricWindow()
    usual.add(observation)
    of_batch.add(replace(observation, is_background=True))
    untimed = {"latency_sum_ms": 0.0, "first_token_sum_ms": 0.0}
    counted: dict[str, Any] = {"latencies": {}, "first_tokens": {}}
    counted |= {"per_token": {}, "answer_tokens": {}}
    assert of_batch == replace(usual, **counted, **untimed)


def recorded(keys: Sequence[int | None], **fields: Any) -> MetricWindow:
    recorder, taken = Recorder(), MetricWindow()
    for key in keys:
        recorder.record(replace(OBSERVATION, endpoint_id="cep_a", sticky_key=key, **fields))
    recorder.hand_over(lambda windows: taken.merge(merged(*windows.values())))
    return taken


def test_a_sticky_key_has_at_most_its_share_of_a_minute_in_what_the_gates_count() -> None:
    """Later requests of it are repeats: they are counted, but not timed."""
    others: list[int | None] = [None] * 59
    window = recorded([*others, *[7] * 41], is_empty=True)
    # Of 62 to 99 requests at most three to five are the key's.
    assert (window.request_count, window.repeated_requests, window.repeated_empty) == (100, 36, 36)
    assert window.sticky_keys == {7: 41}
    for counts in (window.latencies, window.per_token, window.answer_tokens):
        assert sum(counts.values()) == 100 - 36


def test_the_first_request_of_each_sticky_key_counts_and_requests_without_one_all_do() -> None:
    assert recorded(list(range(100))).repeated_requests == 0
    assert recorded([None] * 100).repeated_requests == 0
    assert recorded([1, 1, 2, 2, 2]).repeated_requests == 3


@pytest.mark.parametrize(
    ("outcome", "name"),
    [
        (RequestOutcome.SERVER_ERROR, "errors"),
        (RequestOutcome.CANCELLED, "cancelled"),
        (RequestOutcome.REFUSED, "refused"),
    ],
)
def test_repeats_are_counted_by_how_they_ended(outcome: RequestOutcome, name: str) -> None:
    window = recorded([1, 1, 1], outcome=outcome)
    assert getattr(window, f"repeated_{name}") == 2


def test_embeddings_are_counted_with_their_texts_and_tokens_where_they_succeed() -> None:
    window = MetricWindow()
    for outcome in RequestOutcome:
        window.add(replace(OBSERVATION, outcome=outcome, embedded_texts=5))
    window.add(OBSERVATION)
    total = merged(window, window)
    counts = total.embedding_count, total.embedded_texts, total.embedded_tokens
    assert counts == (2, 10, 2 * OBSERVATION.prompt_tokens)


def test_a_blank_completion_is_a_success_that_is_counted_apart() -> None:
    window = MetricWindow()
    window.add(replace(OBSERVATION, is_empty=True))
    assert (sum(window.latencies.values()), window.empty_count, window.error_count) == (1, 1, 0)


def test_a_recorder_loses_nothing_while_it_is_emptied() -> None:
    recorder, stored = Recorder(), MetricWindow()
    done = threading.Event()

    def store(taken: Mapping[WindowKey, MetricWindow]) -> None:
        stored.merge(merged(*taken.values()))

    def empty() -> None:
        while not done.is_set():
            recorder.hand_over(store)

    emptying = threading.Thread(target=empty)
    emptying.start()
    writers = [
        threading.Thread(target=lambda: [recorder.record(OBSERVATION) for _ in range(2000)])
        for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    done.set()
    emptying.join()
    recorder.hand_over(store)
    assert stored.request_count == 8000


def test_counts_that_could_not_be_stored_are_kept_and_counted_once() -> None:
    recorder = Recorder()
    recorder.record(OBSERVATION)

    def refuse(taken: Mapping[WindowKey, MetricWindow]) -> None:
        # Requests go on while the store fails.
        recorder.record(OBSERVATION)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        recorder.hand_over(refuse)
    taken: dict[WindowKey, MetricWindow] = {}
    recorder.hand_over(taken.update)
    assert {key.start: window.request_count for key, window in taken.items()} == {100: 2}
    recorder.hand_over(lambda windows: pytest.fail("nothing was left"))
