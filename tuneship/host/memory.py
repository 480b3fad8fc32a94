"""Memory that may still be taken: of the machine, or of the container where that has less. Reads kernel files only."""

from dataclasses import dataclass
from pathlib import Path

MACHINE = Path("/proc/meminfo")


@dataclass(frozen=True)
class Container:
    """Where a version of control groups tells about a container's memory."""

    limit: Path
    """`max`, or so much that nobody has it, where there is none."""
    used: Path
    """Copies of files that the kernel keeps are counted, those too that it would give up for anything else."""
    parts: Path
    given_up: str
    """The name, among the parts, of what it would give up first."""


_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
CONTAINERS = (
    Container(_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat", "inactive_file"),
    Container(
        _V1 / "memory.limit_in_bytes",
        _V1 / "memory.usage_in_bytes",
        _V1 / "memory.stat",
        "total_inactive_file",
    ),
)


def limits() -> list[tuple[int, int]]:
    """Bytes of each limit and what is used of it, as Kubernetes and others count: without idle copies of files."""
    found: list[tuple[int, int]] = []
    for one in CONTAINERS:
        if one.limit.is_file() and one.used.is_file():
            text = one.limit.read_text().strip()
            if text.isdigit():
                found.append((int(text), int(one.used.read_text()) - _given_up(one)))
    return found


def _given_up(container: Container) -> int:
    if not container.parts.is_file():
        return 0
    parts = (line.split() for line in container.parts.read_text().splitlines())
    return next((int(part[1]) for part in parts if part[0] == container.given_up), 0)


def free_memory() -> int:
    """Bytes that a process may take without anything being swapped or killed."""
    lines = (line.split() for line in MACHINE.read_text().splitlines())
    available = next(1024 * int(line[1]) for line in lines if line[0] == "MemAvailable:")
    return max(0, min([available, *(limit - used for limit, used in limits())]))
