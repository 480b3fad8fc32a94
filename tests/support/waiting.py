"""What tests that start processes share: waiting for a condition, never for a time, and what is free or alive."""

import asyncio
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")
PATIENCE_S = 300.0
"""How long a condition is waited for: many times what it takes, because a busy host stands still for seconds."""
LOWEST_FREE = 10_000
LOWEST_OF_MOST = 32_768
"""Of the ports that a system gives to connections."""
_GIVEN = set[int]()
"""By `free_port`: who was given one may not listen there yet."""


def until(holds: Callable[[], Found], patience_s: float = PATIENCE_S) -> Found:
    """Poll, bounded; what was found when it was true."""
    end = time.monotonic() + patience_s
    while not (found := holds()):
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.05)
    return found


async def until_async(holds: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """The same without holding up the event loop."""
    async with asyncio.timeout(patience_s):
        while not holds():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


def is_alive(process: int) -> bool:
    """Whether it runs; one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def free_port() -> int:
    """Nobody listens there now, and the system gives it to nobody by itself, as it does with the ports that it chooses
    for listeners and connections: there, another test could get it before it is used.
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
    """Live processes that it started."""
    found: list[int] = []
    for one in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = one.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(parent) == process and state != "Z":
            found.append(int(one.parent.name))
    return found
