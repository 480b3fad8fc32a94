"""Isolates a worker before it reads anything: no network, no other processes, and no files but its own.

Training and serving need none of these: they read a model and communicate over an inherited pair of sockets. So every
worker of ours is isolated (`launch.py`), whether a job requests `network_isolation` or not. There are four layers, none
of which needs root or a library:

- dropped capabilities, so that even a worker of root has the rights of an ordinary user;
- Landlock (`landlock.py`), which denies access to files and to processes outside, whoever the user is;
- a filter of system calls (`system_calls.py`), which denies sockets and other services of the kernel;
- not being dumpable, which hides the process's own memory from others and keeps it out of core files.

`self_check.py` tries all of it from inside. A network namespace alone is not enough: Unix sockets, such as a
database's, work across it; and many container hosts forbid making one.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from contextlib import suppress
from pathlib import Path

from tuneship.isolation.kernel import system_call
from tuneship.isolation.landlock import NoLandlock, Places, confine
from tuneship.isolation.system_calls import ARCHITECTURES, instructions, packed

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = (
    4,
    22,
    24,
    38,
    47,
)
CLEAR_ALL = 4
MODE_FILTER = 2
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITIES_V3 = 0x20080522
LAST_CAPABILITY = 63
# First version of Landlock that restricts signals.
SIGNALS_SINCE_VERSION = 6

# Version of Landlock that restricts this process; 0: it does not.
_landlock = 0


class CannotIsolate(Exception):
    """The kernel lacks a feature that isolation needs, or does not let this process use it."""


class _Program(ctypes.Structure):
    """The C struct `sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def isolate(places: Places, *, is_needed: bool = True) -> None:
    """Restrict this process and all that it starts to these files and folders, irrevocably.

    Must be called while the process has one thread. Raises `CannotIsolate` unless `is_needed` is false, which restricts
    the process as far as the host can.
    """
    global _landlock  # noqa: PLW0603 - a property of the process
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        if is_needed:
            raise CannotIsolate(f"there is no filter for {platform.system()} on {machine}")
        return
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    hide()
    tolerated = () if is_needed else (CannotIsolate,)
    with suppress(*tolerated):
        give_up_capabilities()
    try:
        _landlock = confine(places)
    except NoLandlock as error:
        if is_needed:
            raise CannotIsolate(str(error)) from None
    only_signals_to = os.getpid() if _landlock < SIGNALS_SINCE_VERSION else None
    with suppress(*tolerated):
        set_filter(packed(instructions(machine, only_signals_to, uses_cuda=places.uses_cuda)))


def narrow(places: Places) -> bool:
    """Restrict an isolated process to fewer files; a process that is not isolated stays as it is.

    Returns False when other threads run, which are not restricted. Raises `NoLandlock`.
    """
    if _landlock:
        confine(places)
    return not _landlock or len(list(Path("/proc/self/task").iterdir())) == 1


def set_filter(program: bytes) -> None:
    """Have the kernel run this program before each system call of this process, irrevocably."""
    code = ctypes.create_string_buffer(program, len(program))
    filters = _Program(len(program) // 8, ctypes.addressof(code))
    _prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(filters))


def hide() -> None:
    """Hide this process's memory from other processes of the same user and from core files."""
    # A limit of 0 for core files is not enough: a program that the kernel pipes them to gets them
    # nevertheless.
    if sys.platform == "linux":
        _prctl(PR_SET_DUMPABLE, 0)


def give_up_capabilities() -> None:
    """Drop all capabilities, so that starting another program brings none back."""
    with suppress(CannotIsolate):  # without the right to do this, no program brings any back either
        for number in range(LAST_CAPABILITY + 1):
            _prctl(PR_CAPBSET_DROP, number)
    with suppress(CannotIsolate):
        _prctl(PR_CAP_AMBIENT, CLEAR_ALL)
    header = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITIES_V3, 0), 8)
    none = ctypes.create_string_buffer(24)
    try:
        system_call(CAPSET[platform.machine()], header, none)
    except OSError as error:
        raise CannotIsolate(f"the kernel kept the capabilities: {error.strerror}") from None


def _prctl(option: int, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    rest = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    zeros = [ctypes.c_ulong(0)] * (4 - len(rest))
    if library.prctl(ctypes.c_int(option), *rest, *zeros) != 0:
        raise CannotIsolate(
            f"the kernel refused prctl {option}: {errno.errorcode[ctypes.get_errno()]}"
        )
