"""System calls by number, where Python has no function for them."""

import ctypes
import os


def system_call(number: int, *arguments: object) -> int:
    """Make a system call; integers are passed as C longs. Raises `OSError` with the kernel's error number."""
    library = ctypes.CDLL(None, use_errno=True)
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    answer: int = library.syscall(ctypes.c_long(number), *given)
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer
