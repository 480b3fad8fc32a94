"""The GPUs of this machine, and their distribution among the processes of one service.

Each training and each vLLM server gets the GPUs that the fewest others use, so that two share one only where there are
more processes than GPUs. Who shares is known, and said; nobody waits. Loads no library of a GPU.
"""

import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tuneship.host.machine import this_machine
from tuneship.settings import worker_environment

VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this service may use, as `CUDA_VISIBLE_DEVICES` names them: by number, or by a longer name."""
    count, named = this_machine().gpus, worker_environment({}).get(VARIABLE)
    # In a container the kernel may list the GPUs of the whole host, and only some have a device file.
    files = sum(1 for _ in DEVICES.glob("nvidia[0-9]*"))
    count = min(count, files) if files else count
    return tuple(map(str, range(count))) if named is None else listed_gpus(named, count)


def listed_gpus(named: str, count: int) -> tuple[str, ...]:
    """The GPUs of a value of `CUDA_VISIBLE_DEVICES` as CUDA reads it: those behind an unknown one do not count.

    `count`: the number of GPUs of the machine; 0 where the kernel does not say it.
    """

    def is_known(name: str) -> bool:
        return (not count or int(name) < count) if name.isdecimal() else name[:3] in ("GPU", "MIG")

    return tuple(takewhile(is_known, map(str.strip, named.split(","))))


@dataclass(frozen=True)
class GpuLease:
    """The GPUs of one process."""

    # Empty on a machine without GPUs.
    gpus: tuple[str, ...] = ()
    # Whether another process of this service used one of them when the lease began.
    is_shared: bool = False
    # The other GPUs of the machine, the least used first.
    others: tuple[str, ...] = ()


class GpuLeases:
    """The GPUs in use by processes of this service, with the number of users. Thread-safe."""

    def __init__(self, visible: Callable[[], Sequence[str]] = visible_gpus) -> None:
        """`visible` lists the GPUs; it is called at each lease, because drivers may be loaded later."""
        self._visible = visible
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def lease(self, count: int, named: Sequence[str] = ()) -> Generator[GpuLease]:
        """Hold `count` GPUs with the fewest users (all if there are fewer), or the named ones."""
        with self._lock:
            free_first = sorted(self._visible(), key=self._users.__getitem__)
            gpus = tuple(named or free_first[:count])
            others = tuple(gpu for gpu in free_first if gpu not in gpus)
            lease = GpuLease(gpus, any(self._users[gpu] for gpu in gpus), others)
            self._users.update(gpus)
        try:
            yield lease
        finally:
            with self._lock:
                self._users.subtract(gpus)
