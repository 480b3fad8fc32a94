"""Windows count and merge, and no observation is lost between recorder and store."""

import threading
from collections.abc import Mapping
from dataclasses import replace

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


def test_callers_are_counted_once_and_only_among_the_errors() -> None:
    window = MetricWindow()
    for outcome in RequestOutcome:
        for caller in (1, 2, 2):
            window.add(replace(OBSERVATION, outcome=outcome, caller=caller * len(outcome)))
    # This error has no known caller.
    window.add(replace(OBSERVATION, outcome=RequestOutcome.SERVER_ERROR))
    number = len(RequestOutcome.SERVER_ERROR)
    assert window.error_callers == {number, 2 * number}


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
    cells = dict.fromkeys(("latencies", "first_tokens", "per_token", "answer_tokens"), {})
    assert of_batch == replace(usual, **cells, **untimed)


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
