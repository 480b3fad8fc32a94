"""Returns freed memory to the operating system: adapters that move leave holes in the heap, which malloc keeps."""

import ctypes
from collections.abc import Callable
from functools import cache


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Glibc's function; other libraries return memory by themselves or not at all."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def release_free_memory() -> None:
    """Return what malloc keeps. Takes tens of milliseconds: call it when there is no work."""
    if (trim := _malloc_trim()) is not None:
        trim(0)
