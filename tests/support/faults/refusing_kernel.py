"""Make chosen system calls of a program fail, do only half of their work, or kill the program.

The program starts under a kernel filter (seccomp) that asks this process to decide about every call that a bad disk
could affect, including calls of its children. No debugger is attached: each question is answered at once, and a program
may be killed at any time. A fault therefore hits exactly one file and pass, and the test can check that it happened.
`python -m tests.support.faults.refusing_kernel DESCRIPTOR MODULE ARGUMENTS...` starts a module in this way.
"""

import ctypes
import errno
import fcntl
import os
import platform
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import processes
from tuneship.isolation import isolation
from tuneship.isolation.system_calls import ALLOW, JUMP_IF_EQUAL, LOAD, NUMBER_AT, RETURN, packed

NUMBERS = {
    "x86_64": {
        "write": 1, "pwrite64": 18, "writev": 20, "fsync": 74, "fdatasync": 75, "ftruncate": 77,
        "rename": 82, "renameat": 264, "renameat2": 316, "mkdir": 83, "mkdirat": 258,
        "seccomp": 317, "pidfd_open": 434, "pidfd_getfd": 438,
    },
    "aarch64": {
        "write": 64, "pwrite64": 68, "writev": 66, "fsync": 82, "fdatasync": 83, "ftruncate": 46,
        "renameat": 38, "renameat2": 276, "mkdirat": 34,
        "seccomp": 277, "pidfd_open": 434, "pidfd_getfd": 438,
    },
}  # fmt: skip
# Index of the argument with the new name; the first argument of all other calls is an open file.
NAMED_AT = {"rename": 1, "renameat": 3, "renameat2": 3, "mkdir": 0, "mkdirat": 1}
FLUSH, RENAME, MAKE = ("fsync", "fdatasync"), ("rename", "renameat", "renameat2"), ("mkdir", "mkdirat")  # fmt: skip
# Flags of seccomp; with `UNTIL_DEATH`, only a deadly signal interrupts a call that this process has received.
SET_FILTER, WITH_LISTENER, UNTIL_DEATH = 1, 1 << 3, 1 << 5
ASK = 0x7FC00000
RECEIVE, ANSWER = 0xC0502100, 0xC0182101
CARRY_ON = 1
LONGEST_NAME = 4096


@dataclass(frozen=True)
class Call:
    """A system call that waits for a decision."""

    identifier: int
    thread: int
    name: str
    arguments: tuple[int, ...]

    @property
    def file(self) -> str:
        """The path whose contents or name the call changes.

        Raises `OSError` if the caller has ended or may not be inspected.
        """
        if self.name not in NAMED_AT:
            return str(Path(f"/proc/{self.thread}/fd/{self.arguments[0]}").readlink())
        name = self._memory(self.arguments[NAMED_AT[self.name]], LONGEST_NAME)
        return name.partition(b"\0")[0].decode()

    def _memory(self, address: int, size: int) -> bytes:
        with Path(f"/proc/{self.thread}/mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(size)

    def kill(self) -> None:
        os.kill(self.thread, signal.SIGKILL)  # this ends the whole process

    def do_half(self) -> int:
        """Write the first half, as if the disk had no room for the rest, and return the number of bytes."""
        size = self.arguments[2] // 2
        block = self._memory(self.arguments[1], size)
        status = Path(f"/proc/{self.thread}/status").read_text()
        process = int(re.findall(r"^Tgid:\s+(\d+)", status, re.MULTILINE)[0])
        opened = _system_call("pidfd_open", process, 0)
        try:
            file = _system_call("pidfd_getfd", opened, self.arguments[0], 0)
        finally:
            os.close(opened)
        try:
            if self.name == "pwrite64":
                return os.pwrite(file, block, self.arguments[3])
            return os.write(file, block)
        finally:
            os.close(file)


@dataclass
class Fault:
    """A fault of calls on files whose path matches a pattern, from the `first` to the `last` one (None: for ever)."""

    calls: Sequence[str]
    # The error with which the call fails, such as `EIO` or `ENOSPC`.
    error: str = ""
    # Whether only the first half is written; the call reports this number of bytes and no error.
    is_half: bool = False
    # Whether the call kills the process; with `is_half`, after half was written.
    is_deadly: bool = False
    path: str = ""
    first: int = 1
    last: int | None = None
    # Another fault that must have happened before calls are counted.
    after: "Fault | None" = None
    passes: int = 0
    # The files of the calls that had this fault.
    came: list[str] = field(default_factory=list[str])

    def meets(self, call: Call) -> bool:
        if call.name not in self.calls or (self.after and not self.after.came):
            return False
        if not re.search(self.path, call.file) or (self.is_half and call.arguments[2] < 2):
            return False
        self.passes += 1
        return self.first <= self.passes <= (self.last or self.passes)

    def answer(self, call: Call) -> bytes:
        """Apply the fault and return the answer to the kernel, a `struct seccomp_notif_resp`."""
        file = call.file
        written = call.do_half() if self.is_half else 0
        self.came.append(file)
        if self.is_deadly:
            call.kill()
        refused = getattr(errno, self.error) if self.error else 0
        return struct.pack("=QqiI", call.identifier, written, -refused, 0)


class Kernel:
    """Answers the calls of the programs that it has started, and of their children, until all have ended."""

    def __init__(self) -> None:
        self._faults: tuple[Fault, ...] = ()
        self._names = {number: name for name, number in NUMBERS[platform.machine()].items()}

    def start(self, module: str, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
        """Start a module like `processes.start`; skip the test if programs cannot be watched here."""
        here, there = socket.socketpair()
        with here:
            with there:
                given = (str(there.fileno()), module, *arguments)
                options["pass_fds"] = (there.fileno(),)
                program = processes.start("tests.support.faults.refusing_kernel", *given, **options)
            said, found, _, _ = socket.recv_fds(here, 256, 1)
        if not found:
            program.communicate()
            pytest.skip(f"no program can be watched here: {said.decode()}")
        threading.Thread(target=self._serve, args=found, daemon=True).start()
        return program

    @contextmanager
    def injected(self, *faults: Fault) -> Iterator[None]:
        """Apply these faults during the block, and check that each happens at least once."""
        self._faults = faults
        try:
            yield
        finally:
            self._faults = ()
        for one in faults:
            assert one.came, f"{one}: {one.passes} calls passed, and none met it"

    def _serve(self, listener: int) -> None:
        waiting = select.poll()
        waiting.register(listener, select.POLLIN)
        while waiting.poll()[0][1] & select.POLLIN:  # otherwise all watched programs have ended
            block = bytearray(80)
            with suppress(OSError):  # the program may have ended meanwhile
                fcntl.ioctl(listener, RECEIVE, block)
                fcntl.ioctl(listener, ANSWER, self._answer(block))
        os.close(listener)

    def _answer(self, asked: bytearray) -> bytes:
        identifier, thread, _, number, *_ = struct.unpack_from("=QIIiI", asked)
        call = Call(identifier, thread, self._names[number], struct.unpack_from("=6Q", asked, 32))
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for fault in self._faults:
                if fault.meets(call):
                    return fault.answer(call)
        return struct.pack("=QqiI", identifier, 0, 0, CARRY_ON)


def _system_call(name: str, *arguments: Any) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    given = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    result: int = library.syscall(ctypes.c_long(NUMBERS[platform.machine()][name]), *given)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _watch() -> int:
    """Make this program wait for a decision before each of the calls; return the descriptor that receives them."""
    names = ("write", "pwrite64", "writev", "ftruncate", *FLUSH, *RENAME, *MAKE)
    numbers = [
        NUMBERS[platform.machine()][one] for one in names if one in NUMBERS[platform.machine()]
    ]
    code = [
        (LOAD, 0, 0, NUMBER_AT),
        *((JUMP_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ASK),
    ]
    program = packed(code)
    block = ctypes.create_string_buffer(program, len(program))
    filters = isolation._Program(len(code), ctypes.addressof(block))
    isolation._prctl(isolation.PR_SET_NO_NEW_PRIVS, 1)
    flags = WITH_LISTENER | UNTIL_DEATH
    return _system_call("seccomp", SET_FILTER, flags, ctypes.byref(filters))


def main() -> None:
    """Start a module under the filter, after sending the descriptor that receives its calls over the socket."""
    _, descriptor, *program = sys.argv
    with socket.socket(fileno=int(descriptor)) as teller:
        try:
            socket.send_fds(teller, [b"watched"], [_watch()])
        except OSError as error:
            teller.send(str(error).encode())
            return
    os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", *program])  # noqa: S606


if __name__ == "__main__":
    main()
