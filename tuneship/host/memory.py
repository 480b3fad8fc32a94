"""Free memory of the machine, or of the container where that has less. Reads only files of the kernel."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Container:
    """The files in which a version of control groups reports a container's memory."""

    # `max`, or more than any machine has, where there is no limit.
    limit: Path
    # Includes the page cache, also the part that the kernel would reclaim.
    used: Path
    statistics: Path
    # The name, in the statistics, of the page cache that the kernel reclaims first.
    reclaimable: str


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


@dataclass(frozen=True)
class MemoryFiles:
    """The files in which the kernel reports memory."""

    machine: Path = Path("/proc/meminfo")
    # Both versions: a host may have either, and a file that is missing sets no limit.
    containers: tuple[Container, ...] = CONTAINERS


KERNEL = MemoryFiles()


def limits(files: MemoryFiles = KERNEL) -> list[tuple[int, int]]:
    """Each limit with its used bytes; reclaimable page cache does not count as used, as Kubernetes counts."""
    entries: list[tuple[int, int]] = []
    for container in files.containers:
        if not (container.limit.is_file() and container.used.is_file()):
            continue
        limit = container.limit.read_text().strip()
        if not limit.isdigit():
            continue
        used = int(container.used.read_text())
        if container.statistics.is_file():
            lines = (line.split() for line in container.statistics.read_text().splitlines())
            used -= next((int(line[1]) for line in lines if line[0] == container.reclaimable), 0)
        entries.append((int(limit), used))
    return entries


def free_memory(files: MemoryFiles = KERNEL) -> int:
    """Bytes that a process can allocate without any process being swapped out or killed."""
    lines = (line.split() for line in files.machine.read_text().splitlines())
    available = next(1024 * int(line[1]) for line in lines if line[0] == "MemAvailable:")
    return max(0, min([available, *(limit - used for limit, used in limits(files))]))
