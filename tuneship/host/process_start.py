"""When a process started: with its id, this names one process for good, since ids are used again."""

from pathlib import Path


def process_start(pid: int) -> int | None:
    """The start of a process in clock ticks since boot; None where it has ended, or the system has no /proc."""
    try:
        # The name before the last parenthesis may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie has ended: only its parent has not asked for its exit code yet.
    return None if fields[0] == "Z" else int(fields[19])
