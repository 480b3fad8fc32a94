"""Returns freed memory to the operating system: adapters that move leave holes in the heap, which malloc keeps."""

import ctypes


def release_free_memory() -> None:
    """Return malloc's free memory to the system. Takes tens of milliseconds: call it when idle."""
    # Only glibc has it: other libraries return memory by themselves or not at all.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
