"""Connections are admitted or ended by what they have proved so far, and when."""

import random
from typing import Any

import pytest

from tuneship.host.open_files import (
    MAX_CONNECTIONS,
    ConnectionLimits,
    NotEnoughFiles,
    connection_limits,
)
from tuneship.service.http.sockets.open_connections import KeepPriority, OpenConnections
from tuneship.settings import ServiceSettings


class FakeConnection:
    """Records that it was ended."""

    def __init__(self) -> None:
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True

    def end_if_overdue(self) -> None:
        """Do nothing, because this connection is never overdue."""

    def grace_s(self) -> float:
        return 0.0


def admitted(table: OpenConnections, source: str | None = "a", number: int = 1) -> list[Any]:
    connections = [FakeConnection() for _ in range(number)]
    assert all(table.admit(one, source) for one in connections)
    return connections


def test_the_stranger_that_waits_longest_makes_room_for_a_newcomer() -> None:
    table = OpenConnections(ConnectionLimits(3, 3))
    first, second, third = admitted(table, number=3)
    table.set_priority(first, KeepPriority.STRANGER)  # it has been answered meanwhile
    admitted(table)
    assert [first.is_cut, second.is_cut, third.is_cut] == [False, True, False]
    assert (len(table), table.evicted, table.refused) == (3, 1, 0)


def test_strangers_never_take_the_place_of_a_connection_with_a_key() -> None:
    table = OpenConnections(ConnectionLimits(10, 10))
    busy, idle = admitted(table, number=2)
    table.set_priority(busy, KeepPriority.BUSY)
    table.set_priority(idle, KeepPriority.IDLE)
    hostile = admitted(table, number=1000)
    assert not busy.is_cut
    assert not idle.is_cut
    assert sum(one.is_cut for one in hostile) == 992


def test_idle_connections_with_a_key_make_room_and_busy_ones_do_not() -> None:
    table = OpenConnections(ConnectionLimits(2, 2))
    first, second = admitted(table, number=2)
    table.set_priority(first, KeepPriority.IDLE)
    table.set_priority(second, KeepPriority.BUSY)
    (third,) = admitted(table)
    assert first.is_cut
    table.set_priority(third, KeepPriority.BUSY)
    assert not table.admit(FakeConnection(), "a")
    assert (len(table), table.refused) == (2, 1)


def test_an_address_ends_its_own_connections_first() -> None:
    table = OpenConnections(ConnectionLimits(100, 3))
    (other,) = admitted(table, "other")
    hostile = admitted(table, "hostile", 50)
    assert not other.is_cut
    assert sum(not one.is_cut for one in hostile) == 3
    assert len(table) == 4


def test_connections_of_a_declared_proxy_are_not_those_of_a_stranger() -> None:
    table = OpenConnections(ConnectionLimits(10, 2))
    proxied = admitted(table, None, 8)
    admitted(table, "hostile", 100)
    assert not any(one.is_cut for one in proxied)


def test_the_count_is_right_after_any_history() -> None:
    dice = random.Random(5)  # noqa: S311 - a history, not a secret
    table = OpenConnections(ConnectionLimits(20, 8))
    connections: list[Any] = []
    for _ in range(5000):
        kind = dice.randrange(4)
        if kind == 0 or not connections:
            one = FakeConnection()
            if table.admit(one, dice.choice(["a", "b", "c", None])):
                connections.append(one)
        elif kind == 1:
            table.leave(dice.choice(connections))
        else:
            table.set_priority(dice.choice(connections), dice.choice(list(KeepPriority)))
        assert len(table) == len(list(table)) <= 20
        assert not any(one.is_cut for one in table)  # type: ignore[attr-defined]
        assert all(group.size <= 8 for group in table._sources.values())
    for one in connections:
        table.leave(one)
    assert not len(table)
    assert not table._sources


def test_connections_stay_below_the_limit_of_open_files() -> None:
    default = ServiceSettings()
    assert connection_limits(default, 1024) == ConnectionLimits(512, 256)
    assert connection_limits(default, 300) == ConnectionLimits(150, 75)
    assert connection_limits(default, 1 << 20).together == MAX_CONNECTIONS
    chosen = ServiceSettings(maximum_connections=100, maximum_connections_per_address=7)
    assert connection_limits(chosen, 1024) == ConnectionLimits(100, 7)
    with pytest.raises(NotEnoughFiles, match=r"TUNESHIP_MAXIMUM_CONNECTIONS is 600.*1024.*512"):
        connection_limits(ServiceSettings(maximum_connections=600), 1024)
