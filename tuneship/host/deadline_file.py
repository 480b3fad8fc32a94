"""A deadline that one process writes into a file and another obeys, by a clock that counts while the machine sleeps."""

import time
from pathlib import Path

# Only Linux has it; elsewhere a machine that sleeps stops the clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def elapsed_s() -> float:
    """Seconds since the machine was started, the same for all its processes."""
    return time.clock_gettime(_CLOCK)


def write_deadline(file: Path, deadline: float) -> None:
    """Write a time of `elapsed_s`, atomically. Raises `OSError`."""
    temporary = file.with_name(f".tmp-{file.name}")
    try:
        temporary.write_text(repr(deadline))
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def is_past(file: Path) -> bool:
    """Whether the deadline in a file is over; False without the file. Raises `ValueError` if it holds no time."""
    try:
        return elapsed_s() > float(file.read_text())
    except FileNotFoundError:
        return False
