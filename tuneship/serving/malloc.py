"""Returns freed memory to the operating system: adapters that move leave holes in the heap, which malloc keeps."""

import ctypes


def release_free_memory() -> None:
    """Return what malloc keeps. Takes tens of milliseconds: call it when there is no work."""
    # Only glibc has it: other libraries return memory by themselves or not at all.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
