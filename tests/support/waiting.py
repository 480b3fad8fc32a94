"""Helpers for tests that start processes: wait for conditions, find free ports, and look at processes."""

import asyncio
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")
# Limit for each wait: many times the usual time, because a busy host may stall for seconds.
PATIENCE_S = 300.0
# Limits for the pause between two looks.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
LOWEST_FREE = 10_000
# The lowest port that most systems choose for connections by themselves.
LOWEST_OF_MOST = 32_768
# Ports returned by `free_port`, on which the caller may not listen yet.
_GIVEN = set[int]()


def until(holds: Callable[[], Found], patience_s: float = PATIENCE_S) -> Found:
    """Poll until `holds` returns a true value, and return it; fail after `patience_s`."""
    end = time.monotonic() + patience_s
    while True:
        began = time.monotonic()
        if found := holds():
            return found
        assert time.monotonic() < end, "it never became true"
        time.sleep(pause_after(time.monotonic() - began))


async def until_async(holds: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Poll until `holds` returns a true value, without blocking the event loop."""
    async with asyncio.timeout(patience_s):
        while True:
            began = time.monotonic()
            if holds():
                return
            await asyncio.sleep(pause_after(time.monotonic() - began))


async def until_disconnected(server: asyncio.Server) -> None:
    """Listen no more, and wait until no connection is left: one over TLS ends only when the other side confirms it."""
    server.close()
    # Waits for them from Python 3.12 on.
    await server.wait_closed()
    await until_async(lambda: not getattr(server, "_active_count", 0))


def pause_after(look_s: float) -> float:
    """The pause after a look that took this long: looking must not keep the processor from what is waited for."""
    return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, 10 * look_s))


def is_alive(process: int) -> bool:
    """Whether the process runs; a zombie does not count."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def free_port() -> int:
    """Choose a port on which nobody listens.

    It lies below the range from which the system chooses ports, where another test could get it before it is used.
    """
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(file.read_text().split()[0]) if file.is_file() else LOWEST_OF_MOST
    while True:
        port = random.randrange(LOWEST_FREE, max(lowest, LOWEST_FREE + 1000))  # noqa: S311 - no secret
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port


def children(process: int) -> list[int]:
    """Ids of running child processes."""
    found: list[int] = []
    for one in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = one.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
        if int(parent) == process and state != "Z":
            found.append(int(one.parent.name))
    return found
