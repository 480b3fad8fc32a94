"""What tests that start processes share: waiting for a condition, never for a time, and what is free or alive."""

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path


def until(holds: Callable[[], object], patience_s: float = 120.0) -> None:
    """Poll, bounded."""
    end = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.05)


async def until_async(holds: Callable[[], object], patience_s: float = 120.0) -> None:
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
    """Nobody listens there now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
