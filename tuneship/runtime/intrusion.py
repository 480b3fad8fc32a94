"""What an intruder in a worker would try: `python -m tuneship.runtime.intrusion` isolates itself and tries it.

Prints one JSON object: for every attempt whether it succeeded. Everything it reaches for is its own: listeners that it
opened before, and its parent. With `--open` it does not isolate itself, so that a test can see the attempts succeed.
The service runs it at its start, in a worker (`service/isolation.py`).
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tuneship.runtime.isolation import CannotIsolate, isolate

PTRACE_SEIZE, PIDFD_OPEN = 0x4206, 434
"""`pidfd_open`, which has the same number on every architecture; it is no intrusion by itself."""
CALLS = {
    "x86_64": {"ptrace": 101, "process_vm_readv": 310, "keyctl": 250, "bpf": 321},
    "aarch64": {"ptrace": 117, "process_vm_readv": 270, "keyctl": 219, "bpf": 280},
}
IO_URING_SETUP, PIDFD_GETFD = 425, 438


@dataclass(frozen=True)
class Targets:
    """Listeners that were opened before the isolation."""

    tcp: tuple[str, int]
    tcp6: tuple[str, int] | None
    unix: str
    abstract: str


def attempts(targets: Targets) -> dict[str, Callable[[], object]]:
    """Each raises `OSError` when it does not succeed."""
    numbers = CALLS[os.uname().machine]
    return {
        "tcp": lambda: socket.create_connection(targets.tcp, 2).close(),
        "tcp6": lambda: _connect(socket.AF_INET6, targets.tcp6 or ("::1", 9)),
        "udp": lambda: _send(targets.tcp),
        "unix": lambda: _connect(socket.AF_UNIX, targets.unix),
        "abstract unix": lambda: _connect(socket.AF_UNIX, targets.abstract),
        "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close(),
        "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close(),
        "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(),
        "listen": lambda: socket.create_server(("127.0.0.1", 0)).close(),
        "io_uring": lambda: _call(IO_URING_SETUP, 4, ctypes.create_string_buffer(120)),
        "ptrace": lambda: _call(numbers["ptrace"], PTRACE_SEIZE, os.getppid(), 0, 0),
        "memory of another": lambda: _read_memory_of(os.getppid(), numbers["process_vm_readv"]),
        "descriptor of another": lambda: _take_descriptor(os.getppid()),
        "keys": lambda: _call(numbers["keyctl"], 0, -3, 0),
        "bpf": lambda: _call(numbers["bpf"], 0, ctypes.create_string_buffer(72), 72),
        "child": lambda: _in_child(targets),
    }


def _connect(family: int, address: str | tuple[str, int]) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as opened:
        opened.settimeout(2)
        opened.connect(address)


def _send(address: tuple[str, int]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.sendto(b"x", address)


def _call(number: int, *arguments: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    answer = library.syscall(ctypes.c_long(number), *given)
    if answer < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return int(answer)


def _read_memory_of(process: int, number: int) -> None:
    """One byte at an address that is only likely: EFAULT says that the kernel would have let us."""
    piece = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(piece), 1)
    try:
        _call(number, process, vector, 1, vector, 1, 0)
    except OSError as error:
        if error.errno != 14:
            raise


def _take_descriptor(process: int) -> None:
    handle = _call(PIDFD_OPEN, process, 0)
    os.close(_call(PIDFD_GETFD, handle, 0, 0))


def _in_child(targets: Targets) -> None:
    program = f"import socket; socket.create_connection({targets.tcp!r}, 2)"
    done = subprocess.run(  # noqa: S603 - ourselves
        [sys.executable, "-c", program], stderr=subprocess.DEVNULL, check=False
    )
    if done.returncode != 0:
        raise OSError("refused")


def opened(held: ExitStack) -> Targets:
    """Open what the attempts reach for."""
    tcp = held.enter_context(socket.create_server(("127.0.0.1", 0)))
    tcp6 = None
    if socket.has_ipv6:
        try:
            tcp6 = held.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6))
        except OSError:  # this host has no IPv6: then the attempt fails by itself
            tcp6 = None
    folder = held.enter_context(tempfile.TemporaryDirectory())
    places = str(Path(folder) / "unix"), f"\0tuneship-{os.getpid()}"
    for place in places:
        unix = held.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(place)
        unix.listen()
    return Targets(tcp.getsockname(), tcp6.getsockname()[:2] if tcp6 else None, *places)


def main(arguments: list[str]) -> int:
    """Try everything; 1 when this host cannot isolate."""
    with ExitStack() as held:
        targets = opened(held)
        if arguments != ["--open"]:
            try:
                isolate()
            except CannotIsolate as error:
                sys.stdout.write(json.dumps({"cannot": str(error)}) + "\n")
                return 1
        found: dict[str, bool] = {}
        for name, attempt in attempts(targets).items():
            try:
                attempt()
                found[name] = True
            except OSError:
                found[name] = False
        sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
