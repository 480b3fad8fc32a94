"""A check that isolation holds on this host: a worker tries about a dozen ways out, and all must be refused.

The service makes the check at every start and an agent before it serves, since kernels and container hosts differ. Each
layer of `isolation.py` is tried by a few ways; `tests/unit/isolation/attacks` has all that we know. A way that succeeds
does no harm: it opens files without changing them, sends signal 0, and mounts at a place that does not exist.

`python -m tuneship.isolation.self_check OUTSIDE` tries the ways and prints the names of those that are open.
"""

import ctypes
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tuneship.host.socket_folder import socket_folder

MODULE = "tuneship.isolation.self_check"
CONNECT_TIMEOUT_S = 2
PTRACE_SEIZE = 0x4206
NEW_USERS = 0x1000_0000


@dataclass(frozen=True)
class Outside:
    """Addresses, files, folders and processes that the worker must not reach."""

    tcp: Sequence[str | int]
    udp: Sequence[str | int]
    unix: str
    unix_datagram: str
    another_file: str
    secrets: Sequence[str]
    folders: Sequence[str]
    # Process ids by the name that a message uses.
    processes: Mapping[str, int]


def open_ways(
    run: Callable[[str, str], str],
    scratch: Path,
    *,
    processes: Mapping[str, int],
    secrets: Sequence[Path] = (),
    folders: Sequence[Path],
) -> list[str]:
    """The names of the ways in which a worker can break out. Raises `OSError`, and the errors of `run`.

    `run`: runs a module with one argument in a worker, and returns the last line that it prints. `scratch`: a folder
    that the worker may not use, for a file of another. It must not read the `secrets`, list the `folders` or reach the
    `processes` either.
    """
    with ExitStack() as held:
        # Temporary files lie in the data directory, whose path may be too long for a Unix socket.
        parent = socket_folder(tempfile.gettempdir())
        sockets = held.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix="tuneship-"))
        others = held.enter_context(tempfile.TemporaryDirectory(dir=scratch, prefix="worker-"))
        Path(others, "decoy").write_text("decoy")
        listeners = [
            held.enter_context(socket.socket(family, kind))
            for family in (socket.AF_INET, socket.AF_UNIX)
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)
        ]
        places = ("127.0.0.1", 0), ("127.0.0.1", 0), f"{sockets}/stream", f"{sockets}/datagram"
        for listener, place in zip(listeners, places, strict=True):
            listener.bind(place)
            if listener.type == socket.SOCK_STREAM:
                listener.listen()
        outside = Outside(
            *(listener.getsockname() for listener in listeners),
            another_file=f"{others}/decoy",
            secrets=list(map(str, secrets)),
            folders=list(map(str, folders)),
            processes=processes,
        )
        return json.loads(run(MODULE, json.dumps(asdict(outside))))


def ways(outside: Outside) -> Iterator[tuple[str, Callable[[], object]]]:
    """All ways out by name; a blocked one raises `OSError`."""
    inet, unix = socket.AF_INET, socket.AF_UNIX
    yield "TCP", partial(_connect, inet, outside.tcp)
    yield "UDP", partial(_connect, inet, outside.udp, socket.SOCK_DGRAM)
    yield "Unix socket", partial(_connect, unix, outside.unix)
    yield "datagram to a Unix socket", partial(_send_datagram, outside.unix_datagram)
    yield "passing a descriptor", _pass_descriptor
    for path in outside.secrets:
        yield f"reading {Path(path).name}", partial(_read, path)
    for path in outside.folders:
        yield f"listing {Path(path).name}", partial(os.listdir, path)
    yield "reading another's file", partial(_read, outside.another_file)
    yield "writing another's file", partial(_open_to_write, outside.another_file)
    yield "writing into this program", partial(_open_to_write, __file__)
    for name, process in outside.processes.items():
        yield f"memory of {name}", partial(_read, f"/proc/{process}/mem", size=0)
        yield f"tracing {name}", partial(_call, "ptrace", PTRACE_SEIZE, process, None, None)
        yield f"signal to {name}", partial(os.kill, process, 0)
    yield "mount", _mount
    # Last, since it changes what this process may do.
    yield "new user namespace", partial(_call, "unshare", NEW_USERS)


def _connect(family: int, address: Sequence[str | int], kind: int = socket.SOCK_STREAM) -> None:
    with socket.socket(family, kind) as made:
        made.settimeout(CONNECT_TIMEOUT_S)
        made.connect(address if isinstance(address, str) else tuple(address))


def _send_datagram(address: str) -> None:
    # From one end of a pair, which is made without the system call `socket`.
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        one.sendto(b"text", address)


def _pass_descriptor() -> None:
    one, other = socket.socketpair()
    with one, other:
        socket.send_fds(one, [b"x"], [0])


def _read(path: str, size: int = 1) -> None:
    with Path(path).open("rb", buffering=0) as file:
        file.read(size)


def _open_to_write(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND))


def _mount() -> None:
    # A kernel that looks for the place has allowed the call.
    with suppress(FileNotFoundError):
        _call("mount", b"none", b"/nonexistent", b"tmpfs", 0, None)


def _call(name: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _is_refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


def main(arguments: Sequence[str]) -> int:
    """Try all ways out, with the targets described by the only argument."""
    outside = Outside(**json.loads(arguments[0]))
    still_open = [name for name, attempt in ways(outside) if not _is_refused(attempt)]
    sys.stdout.write(json.dumps(still_open) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
