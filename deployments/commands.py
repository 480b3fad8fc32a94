"""Programs that run to their end while whoever started them waits."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).parents[1]
MAX_LAST_LINE_CHARACTERS = 300


class CommandFailed(Exception):
    """A program did not end well; the message has its last line."""


def run_module(failed: str, environment: Mapping[str, str], *arguments: str) -> str:
    """Run a module in the project's folder, and return its output.

    Raises `CommandFailed`, whose message begins with `failed`.
    """
    done = subprocess.run(  # noqa: S603 - our own program or Prefect's
        [sys.executable, "-m", *arguments],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=PROJECT,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
        raise CommandFailed(f"{failed}: {said[-1][:MAX_LAST_LINE_CHARACTERS]}")
    return done.stdout
