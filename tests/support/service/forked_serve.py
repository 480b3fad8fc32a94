"""A program that runs `tuneship serve` in forked children, so that a start does not load the modules again.

The command `start` on standard input forks a child, which prints `ready <url>` like the service; `kill` ends it with
SIGKILL and prints `killed`. The child runs the real `serve`, but its workers are played, and trainings complete at
once.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic import SecretStr

from tests.support.service import processes
from tests.support.service.engines import PlayedEngines
from tests.support.service.in_process import ANSWER, CATALOGUE
from tests.support.service.processes import Starter
from tuneship.service import serve
from tuneship.settings import ServiceSettings

# A file in the data folder: while it exists, no replica of a newly started service becomes ready.
NOBODY_WORKS = "nobody-works"


class ForkedServe:
    """A `tuneship serve` that a test can kill and start again quickly."""

    def __init__(
        self, data_dir: Path, database_url: str, starter: Starter = processes.start
    ) -> None:
        self.data_dir = data_dir
        self.log = data_dir.parent / "log"
        self.ready_s: list[float] = []
        command = ("tests.support.service.forked_serve", str(data_dir), database_url)
        with self.log.open("a") as log:
            self.program = starter(*command, stdin=subprocess.PIPE, stderr=log)
        self.start()
        self.ready_s.clear()  # the first start includes loading the modules

    def start(self) -> None:
        begun = time.monotonic()
        answer = self._tell("start")
        self.ready_s.append(time.monotonic() - begun)
        assert answer.startswith("ready "), f"{answer} {self.log.read_text()[-2000:]}"
        self.url = answer.split()[1]
        self.pid: int = json.loads((self.data_dir / "service.json").read_text())["pid"]

    def kill(self) -> None:
        assert self._tell("kill") == "killed\n"

    def _tell(self, order: str) -> str:
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write(order + "\n")
        self.program.stdin.flush()
        return self.program.stdout.readline()

    def end(self) -> None:
        self.program.communicate(timeout=120)
        assert self.program.returncode == 0


def run(data_dir: Path, url: str) -> None:
    tokenizer: Any = CATALOGUE.default.tokenizer
    engines = PlayedEngines(tokenizer.encode(ANSWER, add_special_tokens=False).ids)
    engines.trains_at_once = True
    if (data_dir / NOBODY_WORKS).exists():
        engines.may_start.clear()
    settings = ServiceSettings(
        data_dir=data_dir,
        port=0,
        database_url=SecretStr(url) if url else None,
        control_requests_per_minute=10**6,
        maximum_active_jobs=10**6,
        maximum_deployments=10**6,
        maximum_datasets=10**6,
    )
    with (
        patch.object(serve, "ForkedProcesses", lambda **_: engines),
        patch.object(serve, "can_isolate", lambda _: True),  # the check concerns real workers
    ):
        # With its parent, so that a failing test leaves no process running.
        serve.serve(settings, with_parent=os.getppid())


def main() -> None:
    data_dir, url, child = Path(sys.argv[1]), sys.argv[2], 0
    for line in sys.stdin:
        if line == "start\n":
            child = os.fork()
            if child == 0:
                run(data_dir, url)
                os._exit(0)
        else:
            os.kill(child, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
            print("killed", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
