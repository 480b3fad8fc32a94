"""Ends a hanging service: its event loop is stuck, or the service does not end in time after a signal.

`python -I -S guard.py STALLED_S END_S` is a process beside the service, because no thread of the service runs while
some other one holds Python's lock. On standard input come a `.` for each second in which the event loop moved, and the
number of each signal to end, which Python writes even then (`signal.set_wakeup_fd`). Imports nothing of tuneship.
"""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

BEAT = b"."
# A longer gap is not the service's fault: the machine slept or was stopped.
LONGEST_STEP_S = 2.0
# For the stacks of all threads, which the service writes to its log.
LAST_WORDS_S = 5.0


class Guard:
    """The guard of this process. Make it in the main thread."""

    def __init__(self, stalled_s: float, end_s: float) -> None:
        """`stalled_s`: how long the event loop may be stuck; `end_s`: time from a signal to the end."""
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        try:
            command = [sys.executable, "-I", "-S", __file__, str(stalled_s), str(end_s)]
            subprocess.Popen(command, stdin=reading, stdout=subprocess.DEVNULL)  # noqa: S603 - ourselves
        finally:
            os.close(reading)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def beat(self) -> bool:
        """Say that the event loop moves; whether the guard still listens."""
        try:
            os.write(self._writing, BEAT)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def watch(service: int, stalled_s: float, end_s: float) -> str | None:
    """Return why the service must be ended; None when it has ended by itself."""
    silent_s, ending_s = 0.0, None
    before = time.monotonic()
    while silent_s < stalled_s and (ending_s is None or ending_s < end_s):
        said = b""
        if select.select([0], [], [], 0.5)[0]:
            said = os.read(0, 4096)
            if not said:
                return None
        now = time.monotonic()
        step_s = 0.0 if is_stopped(service) else min(now - before, LONGEST_STEP_S)
        before = now
        silent_s = 0.0 if BEAT in said else silent_s + step_s
        if ending_s is not None:
            ending_s += step_s
        elif {signal.SIGTERM, signal.SIGINT} & set(said):
            ending_s = 0.0
    if ending_s is not None and ending_s >= end_s:
        return f"it has not ended {end_s:.0f} s after a signal"
    return f"its event loop has not moved for {stalled_s:.0f} s"


def is_stopped(process: int) -> bool:
    """Whether a process is stopped by SIGSTOP or a debugger; false where the system does not say."""
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in {b"T", b"t"}


def main() -> None:
    """Watch the parent process."""
    # Ctrl-C reaches the whole group of a terminal: the service ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    service = os.getppid()
    why = watch(service, *map(float, sys.argv[1:]))
    if why is None or os.getppid() != service:
        return
    sys.stderr.write(f"the service is ended, since {why}; the stacks of its threads follow\n")
    sys.stderr.flush()
    for number in (signal.SIGABRT, signal.SIGKILL):
        if os.getppid() != service:
            return
        os.kill(service, number)
        end = time.monotonic() + LAST_WORDS_S
        # The event loop may move, and signals may come.
        while (left_s := end - time.monotonic()) > 0 and select.select([0], [], [], left_s)[0]:
            if not os.read(0, 4096):
                return


if __name__ == "__main__":
    main()
