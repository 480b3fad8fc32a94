"""Processes that outlive the command that started them, recorded by id and start time so that only these are ended."""

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from deployments.commands import MAX_LAST_LINE_CHARACTERS
from tuneship.host.process_start import process_start

# Longer than the service needs to end: it drains for 30 s, and for 20 s more it waits for what
# hangs.
STOP_WITHIN_S = 55.0


def answers(url: str, status: int = 200) -> bool:
    """Whether an address answers with a status."""
    try:
        return httpx.get(url, trust_env=False, timeout=2.0).status_code == status
    except httpx.HTTPError:
        return False


def say(text: str) -> None:
    """Print a line without buffering."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class NotStarted(Exception):
    """A process did not become ready; the message has its last line and names its log."""


class AtWork(Exception):
    """Another program is starting or ending processes of the same folder."""


@dataclass(frozen=True)
class RecordedProcess:
    """One recorded process. `started`, in clock ticks since boot, tells it from another one with a reused id."""

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return process_start(self.pid) == self.started


class ProcessFolder:
    """The records of one folder: `<name>.json` beside `<name>.log`."""

    def __init__(self, folder: Path) -> None:
        """`folder` is made when it is missing."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    @contextmanager
    def alone(self) -> Generator[None]:
        """Lock the folder against other commands while the block runs. Raises `AtWork`."""
        with (self._folder / "lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AtWork(f"another command starts or ends what is in {self._folder}") from None
            yield

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self._folder / f"{name}.log"

    def _record(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def running(self, name: str) -> RecordedProcess | None:
        """The live process of that name."""
        try:
            process = RecordedProcess(**json.loads(self._record(name).read_text()))
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
        """Start a process in a session of its own and wait until it is ready. Raises `NotStarted` or `OSError`.

        No process is left then, nor when the wait is interrupted.
        """
        log = self.log(name)
        # The log may hold earlier runs, whose last line would explain nothing.
        before = log.stat().st_size if log.is_file() else 0
        process = _spawn(command, environment, log)
        try:
            self._record(name).write_text(json.dumps(asdict(process)) + "\n")
            end = time.monotonic() + within_s
            while process.is_alive and time.monotonic() < end:
                if is_ready():
                    return
                time.sleep(0.1)
        except BaseException:
            self._forget(name, process)
            raise
        self._forget(name, process)
        with log.open("rb") as file:
            file.seek(before)
            lines = [line.strip() for line in file.read().decode(errors="replace").split("\n")]
        last_line = next(filter(None, reversed(lines)), "no message")[:MAX_LAST_LINE_CHARACTERS]
        raise NotStarted(f"{name} did not start: {last_line} (log: {log})")

    def _forget(self, name: str, process: RecordedProcess) -> None:
        """End the process, then delete its record: a process without a record would be worse than the reverse."""
        with suppress(ProcessLookupError):  # it has just ended by itself
            if process.is_alive:
                os.kill(process.pid, signal.SIGTERM)
            end = time.monotonic() + STOP_WITHIN_S
            while process.is_alive and time.monotonic() < end:
                time.sleep(0.1)
            if process.is_alive:
                os.kill(process.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # it was started by another run of this program
            os.waitpid(process.pid, 0)
        self._record(name).unlink(missing_ok=True)

    def stop(self, name: str) -> bool:
        """End the process of that name. Returns whether one was running."""
        process = self.running(name)
        if process is None:
            self._record(name).unlink(missing_ok=True)
        else:
            self._forget(name, process)
        return process is not None


def _spawn(command: Sequence[str], environment: Mapping[str, str], log: Path) -> RecordedProcess:
    with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
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
            # Background jobs of a shell ignore SIGINT, and so do their children; Prefect's worker ends by that signal.
            setsigdef=[signal.SIGINT],
        )
    return RecordedProcess(pid, process_start(pid) or 0)
