"""What the service may use of the machine that it runs on: cores, memory, GPUs. Reads the kernel's files only."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tuneship.host.memory import free_memory, limits

GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
GIB = 1 << 30
LEAST_CACHE_BYTES = 64 << 20
# Of the free memory: the rest is for the batches of what runs already.
SHARE = 0.9


@dataclass(frozen=True)
class Machine:
    """What the service may use."""

    cpus: int
    memory_bytes: int
    gpus: int


def this_machine() -> Machine:
    """Read again each time: a driver may come and a limit may change. No library of the GPU's is loaded for it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=min([total, *(limit for limit, _ in limits())]),
        gpus=sum(1 for _ in GPU_FOLDER.iterdir()) if GPU_FOLDER.is_dir() else 0,
    )


def cache_share(base: Path, processes: int) -> int:
    """Bytes for the keys and values of one serving process of a base model, of which there may be so many.

    Half of what is free beside the weights at most; never so little that a small model could not answer.
    """
    weights = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    return max(LEAST_CACHE_BYTES, (free_memory() - weights) // max(2, processes))


def resident_memory(process: int) -> int:
    """Bytes of a process in main memory; 0 when it has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def more_processes(like: Collection[int]) -> int:
    """How many more processes as big as the biggest of these fit into memory; at least one while there is none."""
    biggest = max((resident_memory(one) for one in like), default=0)
    return int(SHARE * free_memory()) // biggest if biggest else 1
