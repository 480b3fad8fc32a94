"""Runs a third-party program as a worker, and removes everything that it leaves behind.

`python -m tuneship.processes.launch PARENT_PID tuneship.processes.external_program FOLDER PROGRAM ARGUMENTS...`. Such a
program starts processes of its own that do not notice the service's death, so when the service or the program ends,
the whole process group is ended, and FOLDER (the program's working directory, with its socket) is removed.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from tuneship.processes.launch import die_with_parent

# A killed process may have gone on writing for a moment.
REMOVALS, PAUSE_S = 100, 0.01


def main() -> None:
    """Run the program until it or the service ends."""
    folder, *command = sys.argv[1:]

    def end(_number: int = 0, _frame: FrameType | None = None) -> None:
        for _ in range(REMOVALS):
            kill_others()
            shutil.rmtree(folder, ignore_errors=True)
            if not Path(folder).exists():
                break
            time.sleep(PAUSE_S)
        os.killpg(0, signal.SIGKILL)  # this process too

    signal.signal(signal.SIGHUP, end)
    die_with_parent(os.getppid(), signal.SIGHUP)  # instead of the SIGKILL that `launch` asked for
    # The program gets the SIGTERM to the group as well, and ends by itself.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    try:
        code = subprocess.call(command, cwd=folder)  # noqa: S603 - from the service's settings
        sys.stderr.write(f"the program ended with {code}\n")
    except OSError as error:
        sys.stderr.write(f"the program could not be started: {error.strerror}\n")
    finally:
        sys.stderr.flush()
        end()


def kill_others() -> None:
    """Kill the other processes of this group, which could write to the folder while it is being removed."""
    for process in (int(one.name) for one in Path("/proc").glob("[0-9]*")):
        with suppress(ProcessLookupError):
            if process != os.getpid() and os.getpgid(process) == os.getpgrp():
                os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
