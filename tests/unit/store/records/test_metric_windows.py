"""All widths agree, in whatever order observations come, and each width is forgotten in its time."""

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from tests.support.waiting import until
from tuneship.metrics import columns
from tuneship.metrics.observations import Observation, RequestOutcome
from tuneship.metrics.recorder import Recorder, WindowKey
from tuneship.metrics.windows import MetricWindow
from tuneship.store.database import tables
from tuneship.store.database.database import Database
from tuneship.store.records import metric_windows
from tuneship.store.records.metric_windows import (
    HOUR,
    MINUTE,
    SECOND,
    WIDTHS,
    WindowSource,
    covering,
)

pytestmark = pytest.mark.both_databases

NOW = 1_800_000_000 // HOUR * HOUR
DAY = 24 * HOUR
# The numbers of two members.
SHARDS = (3, 2**61)


def window(count: int = 1, latency: int = 10) -> MetricWindow:
    return MetricWindow(count, 0, 0, 1.0 * count, count, count, {latency: count})


def counts(
    connection: sa.Connection,
    width: int,
    endpoint_id: str = "",
    span: tuple[int, int] = (0, NOW * 2),
) -> dict[int, int]:
    starts, found = metric_windows.facts(
        connection, WindowSource("dep_1", endpoint_id), width, *span
    )
    return dict(zip(starts.tolist(), found["requests"].tolist(), strict=True))


OFFSETS = st.lists(
    st.lists(st.tuples(st.integers(0, 3 * HOUR), st.sampled_from(["", "cep_1"])), max_size=6),
    max_size=4,
)


@given(ticks=OFFSETS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_width_and_the_hours_minutes_say_the_same(
    database: Database, ticks: list[list[tuple[int, str]]]
) -> None:
    recorded: Counter[tuple[str, int]] = Counter()
    with database.write() as connection:
        # Remove the rows of the example before.
        connection.execute(sa.delete(tables.metric_windows))
        # Some of these observations are late.
        for tick in ticks:
            windows = {WindowKey("dep_1", one, NOW - offset): window() for offset, one in tick}
            metric_windows.store(connection, windows, NOW)
            recorded.update((key.endpoint_id, key.start) for key in windows)
        for width in WIDTHS:
            every, canary = Counter[int](), Counter[int]()
            for (endpoint_id, start), count in recorded.items():
                every[start // width * width] += count
                canary[start // width * width] += count * bool(endpoint_id)
            assert counts(connection, width) == every
            assert counts(connection, width, "cep_1") == +canary
            starts, found = metric_windows.sketches(
                connection, WindowSource("dep_1"), width, 0, NOW * 2
            )
            assert starts.tolist() == sorted(every)
            assert found.facts["requests"].tolist() == [every[start] for start in sorted(every)]
            assert found.latencies.values["count"].sum() == recorded.total()


def test_more_windows_than_are_written_at_once(database: Database) -> None:
    windows = {WindowKey("dep_1", "", NOW - second): window() for second in range(1, 1001)}
    with database.write() as connection:
        metric_windows.store(connection, windows, NOW)
        metric_windows.store(connection, windows, NOW)
        for width in WIDTHS:
            assert sum(counts(connection, width).values()) == 2000
        assert set(counts(connection, SECOND).values()) == {2}


def test_counts_of_a_rolled_back_transaction_are_stored_once_by_the_next_one(
    database: Database,
) -> None:
    recorder = Recorder()
    recorder.record(Observation("dep_1", "", NOW + 0.5, RequestOutcome.SUCCESS, 10.0))

    def fail(windows: Mapping[WindowKey, MetricWindow]) -> None:
        with database.write() as connection:
            metric_windows.store(connection, windows, NOW)
            raise OSError("disk full")

    def succeed(windows: Mapping[WindowKey, MetricWindow]) -> None:
        with database.write() as connection:
            metric_windows.store(connection, windows, NOW)

    with pytest.raises(OSError, match="disk"):
        recorder.hand_over(fail)
    recorder.hand_over(succeed)
    recorder.hand_over(succeed)
    with database.read() as connection:
        assert [sum(counts(connection, width).values()) for width in WIDTHS] == [1, 1, 1]


def test_only_the_span_is_read_and_only_the_series(database: Database) -> None:
    with database.write() as connection:
        for start in (NOW, NOW + 60, NOW + 120):
            metric_windows.store(connection, {WindowKey("dep_1", "", start): window()}, NOW)
        metric_windows.store(connection, {WindowKey("dep_2", "", NOW): window()}, NOW)
        assert counts(connection, MINUTE, span=(NOW + 60, NOW + 120)) == {NOW + 60: 1}


def test_each_width_is_forgotten_in_its_time(database: Database) -> None:
    ages = (0, 3 * DAY, 91 * DAY)
    with database.write() as connection:
        for age in ages:
            then = {WindowKey("dep_1", "", NOW - age): window()}
            metric_windows.store(connection, then, NOW - age)
        metric_windows.forget(connection, NOW)
        found = {
            width: sorted(NOW - start for start in counts(connection, width)) for width in WIDTHS
        }
        late = {WindowKey("dep_1", "", NOW - age): window() for age in ages}
        metric_windows.store(connection, late, NOW)
        again = {width: set(counts(connection, width).values()) for width in WIDTHS}
    assert found == {SECOND: [0], MINUTE: [0, 3 * DAY], HOUR: [0, 3 * DAY]}
    # Late data must not restore windows that were forgotten.
    assert again == {SECOND: {2}, MINUTE: {2}, HOUR: {2}}


def test_calls_without_an_answer_have_rows_of_every_width(database: Database) -> None:
    lost = {
        WindowKey("dep_1", "cep_1", NOW): MetricWindow(cancelled_count=1),
        WindowKey("dep_1", "", NOW + 61): MetricWindow(refused_count=2),
    }
    with database.write() as connection:
        metric_windows.store(connection, lost, NOW)
        metric_windows.store(connection, lost, NOW)
        for width in WIDTHS:
            starts, found = metric_windows.facts(
                connection, WindowSource("dep_1"), width, 0, NOW * 2
            )
            assert starts.tolist() == sorted({one.start // width * width for one in lost})
            assert found["requests"].tolist() == [0] * len(starts)
            assert (found["cancelled"].sum(), found["refused"].sum()) == (2, 4)


def test_callers_are_counted_once_however_often_a_window_is_added_to(database: Database) -> None:
    def met(first: int, last: int) -> MetricWindow:
        return MetricWindow(last - first, last - first, error_callers=set(range(first, last)))

    with database.write() as connection:
        for second, (first, last) in enumerate([(0, 10), (5, 15), (0, 15), (2**32 - 1, 2**32)]):
            windows = {WindowKey("dep_1", "", NOW + second % 2): met(first, last)}
            metric_windows.store(connection, windows, NOW)
        _, seconds = metric_windows.facts(connection, WindowSource("dep_1"), SECOND, 0, NOW * 2)
        _, hours = metric_windows.sketches(connection, WindowSource("dep_1"), HOUR, 0, NOW * 2)
    assert seconds["error_callers"].tolist() == [15, 11]
    assert hours.facts["error_callers"].tolist() == [16]
    assert hours.error_callers.values.tolist() == [*range(15), 2**32 - 1]


def answered(start: float, number: int) -> list[Observation]:
    """Draw answers of one minute: log-normal times and lengths, a hundred callers."""
    dice = np.random.default_rng(int(start))
    return [
        Observation(
            *("dep_1", "cep_1", start + place * 60 / number, RequestOutcome.SUCCESS),
            latency_ms=float(dice.lognormal(6, 0.5)),
            prompt_tokens=300,
            completion_tokens=int(dice.lognormal(4.8, 0.6)),
            sticky_key=int(dice.integers(100)),
            replicas=2,
        )
        for place in range(number)
    ]


@pytest.mark.parametrize("per_minute", [10, 300, 3_000])
def test_finer_counts_take_at_most_half_as_much_as_the_windows(
    database: Database, per_minute: int
) -> None:
    recorder = Recorder()
    for minute in range(3):
        for one in answered(NOW - 600 + 60 * minute, per_minute):
            # Without a split of several deployments no key is kept.
            recorder.record(replace(one, sticky_key=None))

    def store(windows: Mapping[WindowKey, MetricWindow]) -> None:
        with database.write() as connection:
            metric_windows.store(connection, windows, NOW)

    recorder.hand_over(store)
    with database.read() as connection:
        windows = connection.execute(sa.select(tables.metric_windows)).all()
        finer = connection.execute(sa.select(tables.finer_windows)).all()
    assert len(windows) == len(finer)
    key = len("dep_0123456789abcdefghijcep_0123456789abcdefghij") + 10
    for width in (SECOND, MINUTE):
        before = sum(key + len(row.window) for row in windows if row.width == width)
        more = sum(key + len(row.counts) for row in finer if row.width == width)
        assert more <= 0.5 * before


def test_finer_counts_of_members_are_put_together_with_their_hours(database: Database) -> None:
    minutes = {NOW - HOUR * 2 + 60: SHARDS[0], NOW - HOUR * 2 + 61: SHARDS[1]}
    source = WindowSource("dep_1", "cep_1")
    with database.write() as connection:
        for start, shard in minutes.items():
            recorder = Recorder()
            for one in answered(start, 30):
                recorder.record(replace(one, ended_at=float(start)))
            recorder.hand_over(
                lambda windows, shard=shard: metric_windows.store(connection, windows, NOW, shard)
            )
        span = NOW - 2 * HOUR, NOW
        apart = metric_windows.sketches(connection, source, MINUTE, *span)[1]
        fold_all(connection, NOW)
        _, together = metric_windows.sketches(connection, source, MINUTE, *span)
        shards = connection.scalars(
            sa.select(tables.finer_windows.c.shard).where(tables.finer_windows.c.width != SECOND)
        )
        assert set(shards) == {metric_windows.WHOLE}
    for one, other in zip(apart.lists, together.lists, strict=True):
        assert one.values.tolist() == other.values.tolist()
    assert columns.callers_of_half(apart) == columns.callers_of_half(together)


def test_requests_that_do_not_count_leave_no_row(database: Database) -> None:
    with database.write() as connection:
        metric_windows.store(connection, {WindowKey("dep_1", "", NOW): MetricWindow()}, NOW)
        assert connection.execute(sa.select(tables.metric_windows)).all() == []


@given(st.integers(0, 3 * HOUR), st.integers(1, 3 * HOUR))
def test_a_span_is_covered_exactly_once_by_aligned_pieces(start: int, length: int) -> None:
    pieces = covering(start, start + length)
    moments = sorted(moment for _, low, high in pieces for moment in range(low, high))
    assert moments == list(range(start, start + length))
    assert all(low % width == high % width == 0 for width, low, high in pieces)


@given(ticks=OFFSETS, folds=st.lists(st.booleans(), min_size=4, max_size=4))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_shards_of_two_members_are_read_as_those_of_one_service(
    database: Database, ticks: list[list[tuple[int, str]]], folds: list[bool]
) -> None:
    """Whenever the leader merges hours, and whatever comes late, every answer is that of one service."""
    with database.write() as connection:
        connection.execute(sa.delete(tables.metric_windows))
        for number, (tick, folds_now) in enumerate(zip(ticks, folds, strict=False)):
            windows = {
                WindowKey("dep_1", one, NOW - offset): window(latency=offset % 90 + 1)
                for offset, one in tick
            }
            alone = {replace(key, deployment_id="dep_2"): one for key, one in windows.items()}
            metric_windows.store(connection, windows, NOW, SHARDS[number % 2])
            metric_windows.store(connection, alone, NOW)
            if folds_now:
                fold_all(connection, NOW)
        for width in WIDTHS:
            for endpoint_id in ("", "cep_1"):
                shared, whole = (
                    (
                        metric_windows.facts(connection, source, width, NOW - 2 * HOUR - 7, NOW),
                        metric_windows.sketches(connection, source, width, 0, 2 * NOW),
                    )
                    for source in (
                        WindowSource("dep_1", endpoint_id),
                        WindowSource("dep_2", endpoint_id),
                    )
                )
                assert shared[0][0].tolist() == whole[0][0].tolist()
                assert shared[0][1].tobytes() == whole[0][1].tobytes()
                assert shared[1][0].tolist() == whole[1][0].tolist()
                assert shared[1][1].encoded() == whole[1][1].encoded()
        fold_all(connection, NOW + 2 * HOUR)
        assert metric_windows.to_fold(connection, NOW * 2) == []
        for width in (MINUTE, HOUR):
            rows_of_both = sa.select(tables.metric_windows.c.deployment_id).where(
                tables.metric_windows.c.width == width
            )
            found = Counter(connection.scalars(rows_of_both))
            assert found["dep_1"] == found["dep_2"], (
                "old hours are no more rows than one service has"
            )


def fold_all(connection: sa.Connection, now: int) -> None:
    for series, hour in metric_windows.to_fold(connection, now):
        metric_windows.fold(connection, series, hour)


def test_the_hours_of_a_member_have_no_minutes_until_the_leader_merges_them(
    database: Database,
) -> None:
    """Whether it is alone in an hour or not, minutes are read from their own rows."""
    given = {WindowKey("dep_1", "", NOW + second): window() for second in (0, 61, HOUR - 1)}
    is_hour = tables.metric_windows.c.width == HOUR
    minutes = sa.select(tables.metric_windows.c.minutes).where(is_hour)
    with database.write() as connection:
        metric_windows.store(connection, given, NOW, SHARDS[0])
        assert list(connection.scalars(minutes)) == [None]
        before = metric_windows.facts(connection, WindowSource("dep_1"), MINUTE, 0, NOW * 2)
        assert before[0].tolist() == [NOW, NOW + MINUTE, NOW + HOUR - MINUTE]
        fold_all(connection, NOW + 2 * HOUR)
        (stored,) = connection.scalars(minutes)
        after = metric_windows.facts(connection, WindowSource("dep_1"), MINUTE, 0, NOW * 2)
    assert len(stored) == 60 * columns.FACTS.itemsize
    assert [one.tobytes() for one in before] == [one.tobytes() for one in after]


def test_a_row_that_somebody_else_has_made_meanwhile_is_not_overwritten(database: Database) -> None:
    """A service that has left a cluster may store a late count while its background work merges that hour."""
    if database.is_sqlite:
        pytest.skip("SQLite has one writer")
    windows = {WindowKey("dep_1", "", NOW): window()}
    with ThreadPoolExecutor(1) as threads:
        with database.write_beside() as one:
            metric_windows.store(one, windows, NOW)

            def late() -> None:
                with database.write_beside() as two:
                    metric_windows.store(two, windows, NOW)

            waiting = threads.submit(late)
            until(lambda: is_waiting(database))
        with pytest.raises(IntegrityError):
            waiting.result()
    late()
    with database.read() as connection:
        assert [sum(counts(connection, width).values()) for width in WIDTHS] == [2, 2, 2]


def is_waiting(database: Database) -> bool:
    """Whether a transaction in this database waits for another one."""
    query = (
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and wait_event_type = 'Lock'"
    )
    with database.read() as connection:
        return bool(connection.execute(sa.text(query)).scalar_one())


def test_an_hour_is_merged_some_time_after_its_end(database: Database) -> None:
    every = WindowSource("dep_1")
    with database.write() as connection:
        metric_windows.store(connection, {WindowKey("dep_1", "", NOW): window()}, NOW, SHARDS[0])
        ends = NOW + HOUR + metric_windows.FOLDED_AFTER_S
        assert metric_windows.to_fold(connection, ends - 1) == []
        assert metric_windows.to_fold(connection, ends) == [(every, NOW)]


def test_an_hour_of_many_endpoints_is_merged(database: Database) -> None:
    """One statement could not name all their keys."""
    made = columns.from_windows([window()])
    (encoded,), (finer,) = made.encoded(), made.encoded_more()
    minutes = encoded[: columns.FACTS.itemsize] * 60
    every = {"deployment_id": "dep_1", "shard": 1, "window": encoded}
    rows: list[dict[str, object]] = []
    for number in range(250):
        one = {**every, "endpoint_id": f"cep_{number}"}
        rows.append({**one, "width": HOUR, "start": NOW, "minutes": minutes})
        starts = range(NOW, NOW + HOUR, MINUTE)
        rows += [{**one, "width": MINUTE, "start": start, "minutes": None} for start in starts]
    with database.write() as connection:
        connection.execute(sa.insert(tables.metric_windows), rows)
        connection.execute(
            sa.insert(tables.finer_windows), [{**one, "counts": finer} for one in rows]
        )
        fold_all(connection, NOW + 2 * HOUR)
        assert metric_windows.to_fold(connection, NOW * 2) == []
        assert sum(counts(connection, MINUTE, "cep_7").values()) == 60


def test_members_store_at_once_while_the_leader_merges_and_nothing_is_lost_or_counted_twice(
    database: Database,
) -> None:
    """On Postgres these six are at work at the same time, on the same hours."""
    each, offsets = 12, range(0, 3 * HOUR, 1_000)

    def member(shard: int, width: int) -> Callable[[], None]:
        def work() -> None:
            for number in range(each):
                windows = {
                    WindowKey(f"dep_{one}", "", NOW - offset - number % width): window()
                    for one in (1, 2)
                    for offset in offsets
                }
                with database.write_beside() as connection:
                    metric_windows.store(connection, windows, NOW, shard)

        return work

    def leader() -> None:
        for _ in range(each):
            with database.read() as connection:
                found = metric_windows.to_fold(connection, NOW + 2 * HOUR)
            for series, hour in found:
                with database.write_beside() as connection:
                    metric_windows.fold(connection, series, hour)

    with ThreadPoolExecutor() as threads:
        works = [member(1, 1), member(2, 7), member(3, 3), leader]
        for done in [threads.submit(work) for work in works]:
            done.result()
    with database.read() as connection:
        for width in WIDTHS:
            assert sum(counts(connection, width).values()) == 3 * each * len(offsets)


def test_a_member_waits_neither_for_a_tenant_nor_for_another_member(database: Database) -> None:
    if database.is_sqlite:
        pytest.skip("SQLite has one writer, which is a service alone")
    windows = {WindowKey("dep_1", "", NOW): window()}
    with database.write(), database.write_beside() as one, database.write_beside() as two:
        metric_windows.store(one, windows, NOW, 1)
        metric_windows.store(two, windows, NOW, 2)
    with database.read() as connection:
        assert [sum(counts(connection, width).values()) for width in WIDTHS] == [2, 2, 2]
