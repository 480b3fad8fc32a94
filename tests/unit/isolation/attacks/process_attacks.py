"""Attacks on other processes, by name; `intrusion.py` attempts them."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from tests.unit.isolation.attacks.intrusion_calls import call, reaches, refuse

PTRACE_SEIZE = 0x4206


def _read_memory(process: int) -> None:
    first = Path(f"/proc/{process}/maps").read_text().split("-")[0] if process else "0"
    with Path(f"/proc/{process}/mem").open("rb", buffering=0) as memory:
        memory.seek(int(first, 16))
        memory.read(8)


def _open_memory(process: int) -> None:
    with Path(f"/proc/{process}/mem").open("r+b", buffering=0):
        pass


def _link(process: int, name: str) -> None:
    Path(f"/proc/{process}/{name}").readlink()


def _read_all(process: int, name: str) -> None:
    refuse(when=not Path(f"/proc/{process}/{name}").read_bytes())


def _thread_memory(process: int) -> None:
    with Path(f"/proc/{process}/task/{process}/mem").open("rb", buffering=0):
        pass


def _descriptors(process: int) -> None:
    """Follow the links to the files that it has open."""
    for link in Path(f"/proc/{process}/fd").iterdir():
        link.readlink()
        return
    refuse(when=True)


def _vector(name: str, process: int) -> None:
    piece = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(piece), 8)
    # An address that no process has: EFAULT, had it been allowed.
    nowhere = (ctypes.c_void_p * 2)(1, 8)
    reaches(name, process, vector, 1, nowhere, 1, 0)


def _steal_descriptor(process: int) -> None:
    os.close(call("pidfd_getfd", call("pidfd_open", process, 0), 0, 0))


def _signal_by_folder(process: int) -> None:
    folder = os.open(f"/proc/{process}", os.O_RDONLY | os.O_DIRECTORY)
    call("pidfd_send_signal", folder, 0, 0, 0)


def _queued(name: str, process: int, *more: int) -> None:
    information = struct.pack("=iii", 0, 0, -1).ljust(128, b"\0")
    call(name, process, *more, 0, ctypes.create_string_buffer(information, 128))


def _owner(process: int) -> None:
    one, other = socket.socketpair()
    with one, other:
        fcntl.fcntl(one, fcntl.F_SETOWN, process)


def _owner_of_socket(process: int) -> None:
    one, other = socket.socketpair()
    with one, other:
        fcntl.ioctl(one, 0x8901, struct.pack("=i", process))


def _limits(process: int) -> None:
    limits = ctypes.create_string_buffer(16)
    call("prlimit64", process, 7, 0, limits)
    call("prlimit64", process, 7, limits, 0)


def _badness(process: int) -> None:
    with Path(f"/proc/{process}/oom_score_adj").open("r+b", buffering=0):
        pass


ON_PROCESSES: dict[str, Callable[[int], object]] = {
    "memory, reading": _read_memory,
    "memory, writing": _open_memory,
    "memory of a thread": _thread_memory,
    "memory by process_vm_readv": lambda pid: _vector("process_vm_readv", pid),
    "memory by process_vm_writev": lambda pid: _vector("process_vm_writev", pid),
    "environment": lambda pid: _read_all(pid, "environ"),
    "memory map": lambda pid: _read_all(pid, "maps"),
    "auxiliary vector": lambda pid: _read_all(pid, "auxv"),
    "input and output": lambda pid: _read_all(pid, "io"),
    "system call": lambda pid: _read_all(pid, "syscall"),
    "open files": _descriptors,
    "root folder": lambda pid: _link(pid, "root"),
    "working folder": lambda pid: _link(pid, "cwd"),
    "program file": lambda pid: _link(pid, "exe"),
    "namespaces": lambda pid: _link(pid, "ns/net"),
    "tracing": lambda pid: call("ptrace", PTRACE_SEIZE, pid, 0, 0),
    "handle": lambda pid: os.close(call("pidfd_open", pid, 0)),
    "descriptor by handle": _steal_descriptor,
    "comparing": lambda pid: call("kcmp", os.getpid(), pid, 1, 0, 0),
    "moving pages": lambda pid: reaches("move_pages", pid, 0, 0, 0, 0, 0),
    "limits": _limits,
    "processors": lambda pid: os.sched_setaffinity(pid, os.sched_getaffinity(pid)),
    "priority": lambda pid: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)),
    "disk priority": lambda pid: call("ioprio_set", 1, pid, 0),
    "choice when memory is short": _badness,
    "signal": lambda pid: os.kill(pid, 0),
    "signal to a thread": lambda pid: call("tkill", pid, 0),
    "signal to a thread of a process": lambda pid: call("tgkill", pid, pid, 0),
    "queued signal": lambda pid: _queued("rt_sigqueueinfo", pid),
    "queued signal to a thread": lambda pid: _queued("rt_tgsigqueueinfo", pid, pid),
    "signal by handle": _signal_by_folder,
    "signal by a file's owner": _owner,
    "signal by a socket's owner": _owner_of_socket,
}  # fmt: skip
