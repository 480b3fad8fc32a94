"""What an intruder reaches for: listeners, decoys and other processes, made by whoever has it tried.

Next: `intrusion.py` tries.
"""

import json
import os
import socket
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DECOY = "decoy"


@dataclass(frozen=True)
class Targets:
    """What the attempts reach for, all of it outside of the intruder."""

    tcp: int
    """Port on 127.0.0.1; 0 for the next one: this host has none."""
    tcp6: int
    udp: int
    unix: str
    unix_datagram: str
    abstract: str
    abstract_datagram: str
    fifo: str
    """With a reader."""
    shared_memory: str
    """A file in memory of another process."""
    decoys: str
    """A folder in the data directory that the intruder has no business in, with a file `decoy`."""
    processes: dict[str, int] = field(default_factory=dict[str, int])
    """By what they are to the intruder."""
    secrets: tuple[str, ...] = ()
    """Files that it must not read."""
    folders: tuple[str, ...] = ()
    """Folders that it must not list."""
    descriptors: tuple[int, ...] = ()
    """That it inherits on purpose, beside its standard ones."""

    @classmethod
    def from_json(cls, text: str) -> "Targets":
        """The inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


@contextmanager
def opened(folder: Path, **more: Any) -> Generator[Targets]:
    """Listeners, decoys and whatever else the attempts reach for; `more`: the remaining fields of `Targets`."""
    with ExitStack() as held:
        place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="tuneship-")))
        decoys = Path(held.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="worker-")))
        (decoys / DECOY).write_text("decoy")
        memory = Path("/dev/shm")  # noqa: S108 - where shared memory lies
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
        names = (str(place / "unix"), str(place / "datagram"), *_abstract_names())
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


def _abstract_names() -> tuple[str, str]:
    return tuple(f"\0tuneship-{os.getpid()}-{os.urandom(4).hex()}" for _ in range(2))  # pyright: ignore[reportReturnType]
