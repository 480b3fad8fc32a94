"""The lines of a script on standard error, so that standard output holds the result alone."""

import logging
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from tuneship.cli.output import readable
from tuneship.prefect.progress import TaskProgress

LINE_EVERY_SECONDS = 10.0


class _Console(Console):
    """A console that falls silent on a broken pipe, where rich would end the program in the middle of a rollout."""

    def on_broken_pipe(self) -> None:
        """Fall silent; rich calls this."""
        self.fall_silent()

    def fall_silent(self) -> None:
        """Print no more, and redirect standard error: Python's last flush would fail and replace the exit code."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


class Lines:
    """One line for each event. Errors of writing are ignored: no run depends on the output."""

    def __init__(self) -> None:
        """Print on standard error."""
        self.console = _Console(stderr=True, highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._last_line: dict[str, float] = {}

    def say(self, text: str, style: str = "") -> None:
        """Print one line with the seconds since the start."""
        elapsed = time.monotonic() - self._started
        with self.or_silent():
            # Names of files, for one, may hold what moves a terminal's cursor.
            words = (readable(text), style)
            self.console.print(Text.assemble((f"{elapsed:7.1f}s ", "dim"), words))

    def wait(self, text: str) -> None:
        """Print what the script waits for."""
        self.say(text)

    def serves_until_the_end(self) -> None:
        """Print nothing: lines name no page of the service."""

    def log(self, text: str, level: int) -> None:
        """Print one line of a flow or task."""
        self.say(text, "yellow" if level >= logging.WARNING else "")

    def show(self, now: TaskProgress) -> None:
        """Print a line now and then, and none for work that is soon done."""
        moment = time.monotonic()
        last = self._last_line.setdefault(now.work, moment)
        if moment - last >= LINE_EVERY_SECONDS:
            self._last_line[now.work] = moment
            form = decimal if now.is_bytes else str
            self.say(f"{now.work}: {form(int(now.done))}/{form(int(now.total))}  {now.detail}")

    def stopping(self) -> None:
        """Print nothing: the clean-up has lines of its own."""

    def close(self, result: Mapping[str, Any] | None) -> None:
        """Print nothing: the flow has said how it ended."""

    @contextmanager
    def or_silent(self) -> Generator[None]:
        """Fall silent where the block cannot write: a full disk or a closed terminal."""
        try:
            yield
        except OSError:
            self.console.fall_silent()
