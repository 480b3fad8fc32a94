"""When a process started: with its id, this names one process for good, since ids are used again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def process_start(pid: int) -> int | None:
    """The start of a process in clock ticks since boot; None where it has ended, or the system has no /proc."""
    try:
        # The name before the last parenthesis may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie has ended: only its parent has not asked for its exit code yet.
    return None if fields[0] == "Z" else int(fields[19])


def still_runs(written: Mapping[str, Any]) -> bool:
    """Whether the process of a service's `service.json`, with its `pid` and when it `started`, still runs."""
    process, started = written.get("pid"), written.get("started")
    return isinstance(process, int) and started is not None and process_start(process) == started
