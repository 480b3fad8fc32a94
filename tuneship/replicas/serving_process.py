"""Starts a process of the built-in engine, and returns it with the end of its socket pair. The process: `serving/`."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuneship.isolation.landlock import Places
from tuneship.processes.worker_protocol import Runtime, Worker, WorkerSpec


@dataclass(frozen=True)
class ServingOptions:
    """Settings of one process."""

    # Size limit of its KV cache; 0 sets none.
    cache_bytes: int
    # Number format of the weights; None: the process chooses, by the model's size and the machine.
    weights: str | None = None


def start_serving(
    runtime: Runtime, base: Path, log: Path, options: ServingOptions, readable: Sequence[Path]
) -> tuple[Worker, socket.socket]:
    """Start the process; it reads nothing but its base model and `readable`. Raises `OSError`.

    Call it on a thread that lives as long as the process may: the parent-death signal follows the thread.
    """
    arguments = ["--cache-bytes", str(options.cache_bytes)]
    if options.weights is not None:
        arguments += ["--weights", options.weights]
    ours, theirs = socket.socketpair()
    with theirs:
        spec = WorkerSpec(
            module="tuneship.serving",
            arguments=("--base", str(base), "--fd", str(theirs.fileno()), *arguments),
            log=log,
            inherited=(theirs.fileno(),),
            places=Places(readable=(base, *readable)),
        )
        try:
            return runtime.start(spec), ours
        except BaseException:
            ours.close()
            raise
