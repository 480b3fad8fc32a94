"""The first thing a worker process runs: make it safe to have, then become the module.

`python -m tuneship.runtime.launch PARENT_PID MODE [--read=PATH ...] [--write=PATH ...] MODULE ARGUMENTS...`. A worker
dies with its parent, leaves no core file and gives up what it does not need (`isolation.py`), which MODE says. Linux
delivers the parent-death signal when the parent *thread* ends, so workers are started from the service's main thread.
Elsewhere the worker notices by itself that its socket or parent is gone.
"""

import ctypes
import os
import resource
import runpy
import signal
import sys
from itertools import takewhile
from pathlib import Path

from tuneship.runtime.isolation import hide, isolate
from tuneship.runtime.landlock import Places

PR_SET_PDEATHSIG = 1
# All is given up, or the worker does not start; as much as the host can do; nothing, for programs
# of others; what the worker is that starts this one.
ISOLATED, WEAKLY_ISOLATED, OPEN, INHERITED = "isolated", "weakly-isolated", "open", "inherited"
READ, WRITE = "--read=", "--write="


def die_with_parent(parent: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel for `with_signal` when the parent dies; exit when it died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:
        sys.exit(1)


def leave_no_core() -> None:
    """What is in memory stays there when this process crashes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Become the named module."""
    parent, mode, *rest = sys.argv[1:]
    options = list(takewhile(lambda one: one.startswith((READ, WRITE)), rest))
    module, *arguments = rest[len(options) :]
    die_with_parent(int(parent))
    leave_no_core()
    os.umask(0o077)
    if mode in {ISOLATED, WEAKLY_ISOLATED}:
        isolate(
            Places(*(_paths(options, kind) for kind in (READ, WRITE))), is_needed=mode == ISOLATED
        )
    else:
        hide()  # of what a worker has given up, the one thing that a further process of its own has not
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _paths(options: list[str], kind: str) -> tuple[Path, ...]:
    return tuple(Path(one.removeprefix(kind)) for one in options if one.startswith(kind))


if __name__ == "__main__":
    main()
