"""The cores, memory and GPUs that the service may use. Reads only files of the kernel."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tuneship.host.memory import KERNEL, MemoryFiles, free_memory, limits
from tuneship.host.weight_files import WeightsFault, weight_files

GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
GIB = 1 << 30
MIN_CACHE_BYTES = 64 << 20
# The rest of the free memory is left for the batches of the processes that run already.
USABLE_SHARE_OF_FREE_MEMORY = 0.9


@dataclass(frozen=True)
class Machine:
    """The part of the machine that the service may use."""

    cpus: int
    memory_bytes: int
    gpus: int


def this_machine(files: MemoryFiles = KERNEL) -> Machine:
    """Read the machine's resources; each call reads them again, since drivers are loaded and limits change."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=min([total, *(limit for limit, _ in limits(files))]),
        # No library of the GPU is loaded for this.
        gpus=sum(1 for _ in GPU_FOLDER.iterdir()) if GPU_FOLDER.is_dir() else 0,
    )


def cache_share(base: Path, processes: int) -> int:
    """Bytes for the KV cache of one of `processes` serving processes of a base model.

    At most half of the memory that is free beside the weights, and never too little for a small model.
    """
    try:
        weights = sum(file.stat().st_size for file in weight_files(base).files)
    except WeightsFault:
        weights = 0  # the process that loads them says so
    return max(MIN_CACHE_BYTES, (free_memory() - weights) // max(2, processes))


def resident_memory(process: int) -> int:
    """Resident bytes of a process; 0 when it has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def more_processes(
    like: Collection[int],
    usable_share: float = USABLE_SHARE_OF_FREE_MEMORY,
    files: MemoryFiles = KERNEL,
) -> int:
    """How many more processes of the size of the largest one fit into memory; 1 if none is running."""
    biggest = max((resident_memory(process) for process in like), default=0)
    return int(usable_share * free_memory(files)) // biggest if biggest else 1
