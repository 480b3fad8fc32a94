"""Lowers the scheduling priority of this process."""

import os
from contextlib import suppress
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


def lower_priority(niceness: int) -> None:
    """Let others go first. A process that was started with less priority keeps that."""
    lowered = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, 0, lowered)
    # Where Linux groups processes by session (autogroup), priorities count within a session only, and each session gets
    # an equal share. A session that this process leads is lowered as a whole; another one holds foreign processes.
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # the kernel has no such groups
            AUTOGROUP.write_text(str(lowered))
