"""A service alone, or the members of a cluster together, pass as many requests of a client in a window as its limit."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from tuneship.service.http.rate_limits import WINDOW_S, RateLimits, RateWindow
from tuneship.service.http.shared_rate_limits import SharedRateLimits
from tuneship.store.cluster import rate_windows
from tuneship.store.database import tables
from tuneship.store.database.database import Database

SHARED = pytest.param("shared", marks=pytest.mark.postgres)
Limits = RateLimits | SharedRateLimits
LIMIT = 100
START = datetime(2026, 7, 1, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def members(database: Database, clock: Clock) -> list[SharedRateLimits]:
    return [SharedRateLimits(LIMIT, LIMIT, clock, database) for _ in range(3)]


@pytest.fixture(params=["alone", SHARED])
def counting(request: pytest.FixtureRequest, clock: Clock) -> list[Limits]:
    """The limits of a service alone, or those of three members of a cluster."""
    if request.param == "alone":
        return [RateLimits(LIMIT, LIMIT, clock)]
    return request.getfixturevalue("members")


async def passed(member: Limits, client: str, kind: str = "control") -> bool:
    window = await member.counted(client, kind)
    assert window is not None
    return not window.exceeded


@pytest.mark.parametrize(
    ("windows", "number"),
    [
        (3, 2),
        pytest.param(100, 16, marks=pytest.mark.soak),
    ],
)
def test_all_together_pass_the_limit_exactly(
    counting: list[Limits], clock: Clock, windows: int, number: int
) -> None:
    clients = [f"client{place}" for place in range(number)]

    async def ask(number: int, client: str) -> bool:
        return await passed(counting[number % len(counting)], client)

    async def round_robin() -> dict[str, int]:
        results = {
            client: await asyncio.gather(*(ask(number, client) for number in range(3 * LIMIT)))
            for client in clients
        }
        return {client: sum(results[client]) for client in clients}

    async def one_after_the_other() -> list[dict[str, int]]:
        found: list[dict[str, int]] = []
        for _ in range(windows):
            found.append(await round_robin())
            clock.now += timedelta(seconds=WINDOW_S)
        return found

    assert asyncio.run(one_after_the_other()) == windows * [dict.fromkeys(clients, LIMIT)]


@pytest.mark.postgres
def test_a_member_that_is_asked_once_keeps_little_from_the_others(
    members: list[SharedRateLimits],
) -> None:
    async def count() -> int:
        first = [await passed(member, "alice") for member in members]
        return sum(first) + sum([await passed(members[0], "alice") for _ in range(2 * LIMIT)])

    used = asyncio.run(count())
    # Chunks are a sixteenth of what is left: two members hold back one each.
    assert LIMIT * 7 // 8 <= used <= LIMIT


def test_kinds_are_apart(counting: list[Limits]) -> None:
    async def ask() -> list[RateWindow | None]:
        kinds = ["control"] * (LIMIT + 1) + ["generate"]
        return [await counting[0].counted("alice", kind) for kind in kinds]

    *_, last, refused, generated = asyncio.run(ask())
    assert last is not None
    assert refused is not None
    assert generated is not None
    assert (last.exceeded, refused.exceeded, generated.exceeded) == (False, True, False)
    assert (refused.limit, refused.remaining, refused.reset) == (LIMIT, 0, last.reset)
    assert 0 < last.reset - START.timestamp() <= min(WINDOW_S, last.retry_after)


@pytest.mark.parametrize("kind", ["alone", SHARED])
def test_a_limit_of_zero_is_none(request: pytest.FixtureRequest, clock: Clock, kind: str) -> None:
    limits = RateLimits(1, 0, clock)
    if kind == "shared":
        limits = SharedRateLimits(1, 0, clock, request.getfixturevalue("database"))
    assert asyncio.run(limits.counted("alice", "generate")) is None
    assert limits.take_spare("alice")


def test_the_remaining_requests_are_shown_and_fall_to_none(counting: list[Limits]) -> None:
    async def shown() -> list[int]:
        windows = [await counting[0].counted("alice", "control") for _ in range(LIMIT + 2)]
        return [window.remaining for window in windows if window is not None]

    assert asyncio.run(shown()) == [*range(LIMIT - 1, -1, -1), 0, 0]


def test_a_batch_takes_no_more_than_half(counting: list[Limits]) -> None:
    async def count() -> int:
        number = 0
        for _ in range(4 * LIMIT):
            number += counting[0].take_spare("alice")
            # A member takes its chunks of the limit in the background.
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        return number

    assert asyncio.run(count()) == LIMIT // 2


@pytest.mark.postgres
def test_windows_that_are_over_are_forgotten(database: Database) -> None:
    with database.write() as connection:
        for ends in (1_000, 2_000):
            rate_windows.take(connection, "alice", "control", ends, LIMIT)
        rate_windows.forget(connection, 1_500)
        assert list(connection.scalars(sa.select(tables.rate_windows.c.ends))) == [2_000]
