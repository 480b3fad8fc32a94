"""Targets of the attacks in `intrusion.py`: listeners, decoys and other processes, made outside of the worker."""

import json
import os
import socket
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuneship.host.socket_folder import socket_folder

DECOY = "decoy"


@dataclass(frozen=True)
class Targets:
    """Addresses, files and processes outside of the worker that attacks it."""

    # Port on 127.0.0.1.
    tcp: int
    # Port on ::1; 0: this host has no IPv6.
    tcp6: int
    udp: int
    unix: str
    unix_datagram: str
    abstract: str
    abstract_datagram: str
    # Named pipe with a reader.
    fifo: str
    # Shared memory file of another process.
    shared_memory: str
    # Folder in the data directory that the worker may not use, with a file `decoy`.
    decoys: str
    # Process ids by their relation to the attacker.
    processes: dict[str, int] = field(default_factory=dict[str, int])
    # Files that the attacker must not read.
    secrets: tuple[str, ...] = ()
    # Folders that the attacker must not list.
    folders: tuple[str, ...] = ()
    # Descriptors that the attacker inherits on purpose, beside the standard ones.
    descriptors: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> "Targets":
        """Read what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)

    def to_json(self) -> str:
        """Write the targets as one line of JSON."""
        return json.dumps(asdict(self))


@contextmanager
def opened(folder: Path, **more: Any) -> Generator[Targets]:
    """Open listeners and make decoys; `more`: the remaining fields of `Targets`."""
    with ExitStack() as held:
        # Temporary files lie in the data directory, whose path may be too long for a socket.
        parent = socket_folder(tempfile.gettempdir())
        sockets = tempfile.TemporaryDirectory(dir=parent, prefix="tuneship-")
        place = Path(held.enter_context(sockets))
        decoys = Path(held.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="worker-")))
        (decoys / DECOY).write_text("decoy")
        memory = Path("/dev/shm")  # noqa: S108 - where shared memory is
        shared = held.enter_context(
            tempfile.NamedTemporaryFile(dir=memory if os.access(memory, os.W_OK) else decoys)
        )
        os.mkfifo(place / "fifo")
        held.callback(os.close, os.open(place / "fifo", os.O_RDONLY | os.O_NONBLOCK))
        tcp = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        tcp6 = 0
        with suppress(OSError):  # a host without IPv6
            server = socket.create_server(("::1", 0), family=socket.AF_INET6)
            tcp6 = held.enter_context(server).getsockname()[1]
        abstract = (f"\0tuneship-{os.getpid()}-{os.urandom(4).hex()}" for _ in range(2))
        names = (str(place / "unix"), str(place / "datagram"), *abstract)
        for name, kind in zip(names, (socket.SOCK_STREAM, socket.SOCK_DGRAM) * 2, strict=True):
            listener = held.enter_context(socket.socket(socket.AF_UNIX, kind))
            listener.bind(name)
            if kind == socket.SOCK_STREAM:
                listener.listen()
        yield Targets(
            *(tcp.getsockname()[1], tcp6, udp.getsockname()[1], *names),
            fifo=str(place / "fifo"),
            shared_memory=shared.name,
            decoys=str(decoys),
            **more,
        )
