"""The first thing a worker process runs: make it safe to have, then become the module.

`python -m tuneship.runtime.launch PARENT_PID isolated|open|inherited MODULE ARGUMENTS...`. A worker dies with its
parent, leaves no core file and, unless it says that it needs it, gives up the network (`isolation.py`). Linux delivers
the parent-death signal when the parent *thread* ends, so workers are started from the service's main thread. Elsewhere
the worker notices by itself that its socket or parent is gone.
"""

import ctypes
import os
import resource
import runpy
import signal
import sys

from tuneship.runtime.isolation import hide, isolate

PR_SET_PDEATHSIG = 1
ISOLATED, OPEN, INHERITED = "isolated", "open", "inherited"
"""What a worker may know of the network; a worker's own further processes: what it does itself."""


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
    parent, network, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    leave_no_core()
    os.umask(0o077)
    if network == ISOLATED:
        isolate()
    elif network == INHERITED:
        hide()  # unlike the filter, that is lost with a new program
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
