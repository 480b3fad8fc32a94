"""Connections are admitted or ended by what they have proved so far, and when."""

import random
from typing import Any

import pytest

from tuneship.host.open_files import MAX_CONNECTIONS, NotEnoughFiles, connection_limit
from tuneship.service.http.sockets.open_connections import OpenConnections
from tuneship.settings import ServiceSettings


class FakeConnection:
    """Records that it was ended."""

    def __init__(self) -> None:
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True

    def end_if_overdue(self) -> None:
        """Do nothing, because this connection is never overdue."""


def admitted(table: OpenConnections, number: int, *, has_key: bool = False) -> list[Any]:
    connections = [FakeConnection() for _ in range(number)]
    assert all(table.admit(one, has_key=has_key) for one in connections)
    return connections


def test_the_keyless_connection_that_waits_longest_makes_room_for_a_newcomer() -> None:
    table = OpenConnections(3)
    first, second, third = admitted(table, 3)
    table.release(first, has_key=False)  # it has been answered meanwhile
    admitted(table, 1)
    assert [first.is_cut, second.is_cut, third.is_cut] == [False, True, False]
    assert (len(table), table.evicted, table.refused) == (3, 1, 0)


def test_keyless_connections_never_take_the_place_of_one_with_a_key() -> None:
    table = OpenConnections(10)
    (proxied,) = admitted(table, 1, has_key=True)
    busy, idle = admitted(table, 2)
    table.protect(busy)
    table.release(idle, has_key=True)
    hostile = admitted(table, 1000)
    assert not any(one.is_cut for one in (busy, idle, proxied))
    assert sum(one.is_cut for one in hostile) == 993


def test_idle_connections_with_a_key_make_room_and_busy_ones_do_not() -> None:
    table = OpenConnections(2)
    first, second = admitted(table, 2, has_key=True)
    table.protect(second)
    (third,) = admitted(table, 1)
    assert first.is_cut
    table.protect(third)
    assert not table.admit(FakeConnection(), has_key=False)
    assert (len(table), table.refused) == (2, 1)


def test_the_count_is_right_after_any_history() -> None:
    dice = random.Random(5)  # noqa: S311 - a history, not a secret
    table = OpenConnections(20)
    connections: list[Any] = []
    for _ in range(5000):
        kind = dice.randrange(5)
        if kind == 0 or not connections:
            one = FakeConnection()
            if table.admit(one, has_key=dice.random() < 0.2):
                connections.append(one)
        elif kind == 1:
            table.leave(dice.choice(connections))
        elif kind == 2:
            table.protect(dice.choice(connections))
        else:
            table.release(dice.choice(connections), has_key=dice.random() < 0.5)
        assert len(table) == len(list(table)) <= 20
        assert not any(one.is_cut for one in table)  # type: ignore[attr-defined]
    for one in connections:
        table.leave(one)
    assert not len(table)
    assert not table.make_room()


def test_connections_stay_below_the_limit_of_open_files() -> None:
    default = ServiceSettings()
    assert connection_limit(default, 1024) == 512
    assert connection_limit(default, 300) == 150
    assert connection_limit(default, 1 << 20) == MAX_CONNECTIONS
    assert connection_limit(ServiceSettings(maximum_connections=100), 1024) == 100
    with pytest.raises(NotEnoughFiles, match=r"TUNESHIP_MAXIMUM_CONNECTIONS is 600.*1024.*512"):
        connection_limit(ServiceSettings(maximum_connections=600), 1024)
