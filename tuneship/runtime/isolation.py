"""A worker without network: a filter of system calls that the kernel keeps for the process and all its children.

Training and serving need no network: they read files and speak over a socket pair that they were born with. So every
worker of ours gives the network up before it loads anything else (`launch.py`), whether a job asked for
`network_isolation` or not. `python -m tuneship.runtime.isolation` tries what an intruder would, from inside, and says
what succeeded; the service asks that at its start and promises isolation only where nothing does.

The filter is written down here, a dozen lines of the kernel's own format (seccomp, BPF), because a library for it
needs a second one from the operating system. A network namespace alone is not enough: Unix sockets, such as a
database's, work across it; and many container hosts forbid making one.
"""

import ctypes
import errno
import platform
import struct
import sys
from dataclasses import dataclass

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
MODE_FILTER = 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_AT, ARCHITECTURE_AT = 0, 4
"""Where `struct seccomp_data` holds the number of the call and the architecture."""
X32 = 0x4000_0000
"""Calls from here on are the same ones by a second numbering (x86-64 only)."""


class CannotIsolate(Exception):
    """There is no such filter here, or this process may not set it."""


@dataclass(frozen=True)
class Machine:
    """A processor's numbering of what a worker must not call.

    Opening, connecting and listening on sockets (a pair of connected ones may be made); rings of calls that no filter
    sees; looking into, or taking descriptors from, other processes; the kernel's key store; namespaces and mounts.
    """

    architecture: int
    refused: dict[str, int]


MACHINES = {
    "x86_64": Machine(
        0xC000003E,
        {
            "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "accept4": 288,
            "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
            "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438,
            "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "userfaultfd": 323,
            "perf_event_open": 298, "unshare": 272, "setns": 308, "mount": 165, "chroot": 161,
        },
    ),
    "aarch64": Machine(
        0xC00000B7,
        {
            "socket": 198, "connect": 203, "accept": 202, "bind": 200, "listen": 201, "accept4": 242,
            "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
            "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_getfd": 438,
            "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280, "userfaultfd": 282,
            "perf_event_open": 241, "unshare": 97, "setns": 268, "mount": 40, "chroot": 51,
        },
    ),
}  # fmt: skip


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def isolate() -> None:
    """Give the network up, for good, for this process and whatever it starts. Raises `CannotIsolate`.

    To be called while the process has one thread: the kernel sets the filter for the calling thread.
    """
    machine = MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        raise CannotIsolate(f"there is no filter for {platform.system()} on {platform.machine()}")
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    hide()
    _set_filter(_instructions(machine))


def _set_filter(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    filters = _Program(len(program) // 8, ctypes.addressof(code))
    _prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(filters))


def hide() -> None:
    """Keep other processes of the same user from looking into this one."""
    _prctl(PR_SET_DUMPABLE, 0)


def _instructions(machine: Machine) -> bytes:
    """Refuse what comes from another architecture or numbering, and the calls of the list; allow the rest."""
    numbers = sorted(machine.refused.values())
    last = len(numbers) + 1  # instructions from the first comparison to the refusal
    code = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_IF_EQUAL, 0, last + 2, machine.architecture),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_IF_AT_LEAST, last, 0, X32),
        *((JUMP_IF_EQUAL, last - 1 - at, 0, number) for at, number in enumerate(numbers)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _prctl(option: int, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    rest = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    zeros = [ctypes.c_ulong(0)] * (4 - len(rest))
    if library.prctl(ctypes.c_int(option), *rest, *zeros) != 0:
        raise CannotIsolate(f"the kernel refused the filter: {errno.errorcode[ctypes.get_errno()]}")
