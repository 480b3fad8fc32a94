"""Gives memory that was freed in between back to the system: adapters that move leave holes, which malloc keeps."""

import ctypes
from collections.abc import Callable
from functools import cache


@cache
def _trim() -> Callable[[int], int] | None:
    """glibc's; other libraries do it by themselves or not at all."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Takes tens of milliseconds: for moments without work."""
    if (trim := _trim()) is not None:
        trim(0)
