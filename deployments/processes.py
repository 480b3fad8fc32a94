"""Processes that outlive the command that started them: recorded by id and start time, so that only these are ended."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

STOP_WITHIN_S = 45.0
"""Longer than the service drains."""


class NotStarted(Exception):
    """A process ended before it was ready, or never became so; the message names its log."""


@dataclass(frozen=True)
class Process:
    """One recorded process; `started` is its start in clock ticks since boot, so that a reused id is no match."""

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return _start_of(self.pid) == self.started


def _start_of(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


class Processes:
    """The records of one folder: `<name>.json` beside `<name>.log`."""

    def __init__(self, folder: Path) -> None:
        """`folder` is made when it is missing."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self._folder / f"{name}.log"

    def running(self, name: str) -> Process | None:
        """The live process of that name."""
        try:
            process = Process(**json.loads((self._folder / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return process if process.is_alive else None

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        is_ready: Callable[[], bool],
        within_s: float = 120.0,
    ) -> None:
        """Start it in a session of its own and wait until it is ready. Raises `NotStarted`, and leaves nothing."""
        with self.log(name).open("ab") as output, Path(os.devnull).open("rb") as nothing:
            # Not subprocess.Popen: its objects complain when a process is meant to outlive them.
            pid = os.posix_spawn(
                command[0],
                list(command),
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, nothing.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
                ],
                setsid=True,
            )
        process = Process(pid, _start_of(pid) or 0)
        (self._folder / f"{name}.json").write_text(json.dumps(asdict(process)) + "\n")
        end = time.monotonic() + within_s
        try:
            while process.is_alive and time.monotonic() < end:
                if is_ready():
                    return
                time.sleep(0.1)
        except BaseException:
            self.stop(name)
            raise
        self.stop(name)
        raise NotStarted(f"{name} did not start; its log is {self.log(name)}")

    def stop(self, name: str) -> bool:
        """SIGTERM, and SIGKILL when that takes too long; answers whether there was anything to end."""
        process = self.running(name)
        if process is not None:
            os.kill(process.pid, signal.SIGTERM)
            end = time.monotonic() + STOP_WITHIN_S
            while process.is_alive and time.monotonic() < end:
                time.sleep(0.1)
            if process.is_alive:
                os.kill(process.pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # it was started by another run of this program
                os.waitpid(process.pid, 0)
        (self._folder / f"{name}.json").unlink(missing_ok=True)
        return process is not None
