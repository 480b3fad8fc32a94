"""The fork server: loads the libraries of workers once, and forks a worker for each request of the service.

`python -m tuneship.processes.fork_server PARENT_PID DESCRIPTOR PADDING`. Loading torch takes seconds and a fork takes
milliseconds, and forked processes share the memory of the libraries. The server itself gets no data of a user: a
request names modules and arguments, and its descriptors go to the worker alone, which isolates itself before it
reads anything. A worker belongs to the service and not to the server, so it lives on when the server dies.
Next: `forked_workers.py`.
"""

import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

from tuneship.isolation.isolation import hide
from tuneship.processes import launch

MAX_MESSAGE_BYTES = 200_000
MAX_DESCRIPTORS = 64
# Exit code of a server that cannot fork: the service starts its workers in another way from then on.
CANNOT_FORK = 3
# Fields of /proc/self/stat behind the name of the program: where the command line begins and ends in memory.
COMMAND_LINE_FIELDS = slice(45, 47)


@dataclass(frozen=True)
class ForkRequest:
    """A worker to fork. Without descriptors: libraries to load while nothing is to be forked."""

    # The modules that are imported before the fork.
    libraries: tuple[str, ...]
    # The arguments of `launch.py`, the module among them.
    arguments: tuple[str, ...] = ()
    # Environment variables that the server itself does not have.
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    # The numbers by which the worker knows its descriptors.
    descriptors: tuple[int, ...] = ()

    def to_json(self) -> bytes:
        """The message that requests it; its descriptors are sent along: the status socket, the log, and the worker's
        own.
        """
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "ForkRequest":
        """The inverse of `to_json`."""
        fields = json.loads(text)
        for name in ("libraries", "arguments", "descriptors"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def main(arguments: Sequence[str]) -> int:
    """Serve until the service closes its end; in a forked worker, run its module."""
    parent = int(arguments[0])
    launch.die_with_parent(parent)
    launch.leave_no_core()
    os.umask(0o077)
    hide()
    show_command([sys.executable, "-m", "tuneship.processes.fork_server", *arguments[:2]])
    try:
        request = fork_on_request(socket.socket(fileno=int(arguments[1])))
    except Exception:  # noqa: BLE001 - e.g. a library that cannot be loaded, which a worker then reports itself
        traceback.print_exc()
        return CANNOT_FORK
    if request is None:
        return 0
    show_command([*launch.COMMAND, *request.arguments])
    launch.run(request.arguments)
    return 0


def fork_on_request(requests: socket.socket) -> ForkRequest | None:
    """Fork workers until the other end is closed. Returns the request in each worker, and None in the server."""
    to_load: list[str] = []
    while True:
        if to_load and not select.select([requests], [], [], 0)[0]:
            load(to_load.pop(0))
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            return None
        request = ForkRequest.from_json(message)
        if not descriptors:
            to_load += request.libraries
            continue
        for name in request.libraries:
            load(name)
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            # A lock that another thread holds would stay locked in the worker for ever.
            raise RuntimeError("a library has started a thread")
        if is_worker_of_service(descriptors[0]):
            requests.close()  # first: the worker may know one of its descriptors by the same number
            take_descriptors(request.descriptors, *descriptors)
            os.environ.update(request.variables)  # noqa: TID251 - the worker's own, from its service
            tempfile.tempdir = None  # it is found again, from the variables
            return request
        for descriptor in descriptors:
            os.close(descriptor)


def load(module: str) -> None:
    """Import a module that workers need."""
    import_module(module)
    # The collector would write to each object that it looks at, and so unshare its memory.
    gc.collect()
    gc.freeze()


def is_worker_of_service(status: int) -> bool:
    """Fork a process as a child of the server's parent, in a session of its own. True in the new process, False in the
    server.

    The process between them sends its process id to the service on `status`, and ends. The service adopts orphans of
    its descendants, as it is their subreaper.
    """
    is_adopted, adopted = os.pipe()
    between = os.fork()
    if between:
        os.close(is_adopted)
        os.waitpid(between, 0)
        with suppress(BrokenPipeError):  # it may have been killed already
            os.write(adopted, b".")
        os.close(adopted)
        return False
    worker = os.fork()
    if worker:
        try:
            os.write(status, str(worker).encode())
        except OSError:  # the service does not want it any more
            os.kill(worker, signal.SIGKILL)
        os._exit(0)
    os.close(adopted)
    os.setsid()
    # The kernel names the new parent a moment before it looks whether the end of the old one is to kill this process,
    # which `launch.py` asks for. So it waits until the server has seen that end.
    if not os.read(is_adopted, 1):
        os._exit(1)  # the server has died
    os.close(is_adopted)
    return True


def take_descriptors(numbers: Sequence[int], status: int, log: int, *own: int) -> None:
    """Write to the log, and know the worker's own descriptors by these numbers."""
    # First above all numbers that are asked for, so that none is overwritten before it is moved.
    above = max((sys.stderr.fileno(), *numbers)) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD, above) for one in (log, *own)]
    for one in (status, log, *own):
        os.close(one)
    for one, number in zip(moved, (sys.stdout.fileno(), *numbers), strict=True):
        os.dup2(one, number)
        os.close(one)
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())


def show_command(command: Sequence[str]) -> None:
    """Show this text as the process's command line, as far as it fits, so that operators see what it does."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[COMMAND_LINE_FIELDS])
    room = end - begin
    text = "\0".join(command).encode()[: room - 1]
    ctypes.memmove(begin, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
