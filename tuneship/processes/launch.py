"""The entry point of worker processes: restricts the process, then runs the module.

`python -m tuneship.processes.launch PARENT_PID MODE [--read=PATH ...] [--write=PATH ...] [--memory=BYTES] [--gpus]
MODULE ARGUMENTS...`. A worker dies with its parent, leaves no core file and gives up rights (`isolation.py`) as MODE
says. Linux delivers the parent-death signal when the parent *thread* ends, so workers are started from the service's
main thread. On other systems the worker notices itself that its socket or parent is gone.
"""

import ctypes
import os
import resource
import runpy
import signal
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from tuneship.host.thread_pools import use_large_stacks
from tuneship.isolation.isolation import hide, isolate
from tuneship.isolation.landlock import Places

# The beginning of a worker's command line.
COMMAND = (sys.executable, "-m", "tuneship.processes.launch")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Modes: full isolation, or the worker does not start; as far as the host can; none, for third-party
# programs; the same as the worker that starts this one.
ISOLATED, WEAKLY_ISOLATED, OPEN, INHERITED = "isolated", "weakly-isolated", "open", "inherited"
READ, WRITE, MEMORY, GPUS = "--read=", "--write=", "--memory=", "--gpus"


def die_with_parent(parent: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel for `with_signal` when the parent dies; exit when it died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:
        sys.exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end. Raises `OSError`."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_CHILD_SUBREAPER, *(ctypes.c_ulong(one) for one in (1, 0, 0, 0))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def leave_no_core() -> None:
    """Write no core file when this process crashes: its memory holds private data."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(command: Sequence[str]) -> None:
    """Restrict this process and run a module in it. `command`: this program's arguments."""
    parent, mode, *rest = command
    options = list(takewhile(lambda option: option.startswith((READ, WRITE, MEMORY, GPUS)), rest))
    module, *arguments = rest[len(options) :]
    die_with_parent(int(parent))
    leave_no_core()
    use_large_stacks()
    os.umask(0o077)
    if mode in {ISOLATED, WEAKLY_ISOLATED}:
        readable, writable, limits = (
            tuple(option.removeprefix(kind) for option in options if option.startswith(kind))
            for kind in (READ, WRITE, MEMORY)
        )
        for limit in map(int, limits):
            # What it allocates, threads' stacks included, but not the files and libraries that it maps.
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        readable, writable = tuple(map(Path, readable)), tuple(map(Path, writable))
        places = Places(readable, writable, uses_gpus=GPUS in options)
        isolate(places, is_needed=mode == ISOLATED)
    else:
        hide()  # the only restriction of a worker that its child processes do not inherit
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run(sys.argv[1:])
