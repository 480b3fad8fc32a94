"""The members of a cluster pass no more requests of a client in a window than its limit, and nearly as many."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from tuneship.service.http.rate_limits import WINDOW_S, RateWindow
from tuneship.service.http.shared_rate_limits import SharedRateLimits
from tuneship.store.cluster import rate_windows
from tuneship.store.database import tables
from tuneship.store.database.database import Database

pytestmark = pytest.mark.postgres

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


async def passed(member: SharedRateLimits, client: str, kind: str = "control") -> bool:
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
def test_all_members_together_pass_the_limit_exactly(
    members: list[SharedRateLimits], database: Database, clock: Clock, windows: int, number: int
) -> None:
    clients = [f"client{place}" for place in range(number)]

    async def ask(number: int, client: str) -> bool:
        return await passed(members[number % len(members)], client)

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
    with database.read() as connection:
        taken = set(connection.scalars(sa.select(tables.rate_windows.c.taken)))
    assert taken == {LIMIT}


def test_a_member_that_is_asked_once_keeps_little_from_the_others(
    members: list[SharedRateLimits],
) -> None:
    async def count() -> int:
        first = [await passed(member, "alice") for member in members]
        return sum(first) + sum([await passed(members[0], "alice") for _ in range(2 * LIMIT)])

    used = asyncio.run(count())
    # Chunks are a sixteenth of what is left: two members hold back one each.
    assert LIMIT * 7 // 8 <= used <= LIMIT


def test_kinds_are_apart_and_a_limit_of_none_asks_nobody(database: Database, clock: Clock) -> None:
    limits = SharedRateLimits(1, 0, clock, database)

    async def ask() -> list[RateWindow | None]:
        return [await limits.counted("alice", kind) for kind in ("control", "control", "generate")]

    one, two, three = asyncio.run(ask())
    assert one is not None
    assert two is not None
    assert (one.exceeded, two.exceeded, three) == (False, True, None)
    assert [(shown.limit, shown.remaining) for shown in (one, two)] == [(1, 0), (1, 0)]
    assert one.reset == two.reset
    assert 0 < one.reset - START.timestamp() <= WINDOW_S


def test_the_remaining_requests_are_shown_and_fall_to_none(members: list[SharedRateLimits]) -> None:
    async def shown() -> list[int]:
        windows = [await members[0].counted("alice", "control") for _ in range(LIMIT + 2)]
        return [window.remaining for window in windows if window is not None]

    assert asyncio.run(shown()) == [*range(LIMIT - 1, -1, -1), 0, 0]


def test_a_batch_takes_no_more_than_half(members: list[SharedRateLimits]) -> None:
    async def count() -> int:
        number = 0
        for _ in range(4 * LIMIT):
            number += members[0].take_spare("alice")
            await asyncio.sleep(0)
            for chunk in members[0]._chunks.values():
                if chunk.taking is not None:
                    await chunk.taking
        return number

    assert asyncio.run(count()) == LIMIT // 2


def test_windows_that_are_over_are_forgotten(database: Database) -> None:
    with database.write() as connection:
        for ends in (1_000, 2_000):
            rate_windows.take(connection, "alice", "control", ends, LIMIT)
        rate_windows.forget(connection, 1_500)
        assert list(connection.scalars(sa.select(tables.rate_windows.c.ends))) == [2_000]
