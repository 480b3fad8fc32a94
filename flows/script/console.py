"""The screen of a script: one line for each event, and live bars for long work.

On a terminal the bar moves in place; in a pipe or a log file it becomes a line now and then. Goes to standard error, so
that standard output holds the result alone.
"""

import logging
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import prefect
from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from tuneship.prefect import progress

LINE_EVERY_SECONDS = 10.0
PREFECT_FOLDER = str(Path(prefect.__file__).parent)
SHOWN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


class _Console(Console):
    """A console that falls silent on a broken pipe, where rich would end the program in the middle of a rollout."""

    def on_broken_pipe(self) -> None:
        """Fall silent; rich calls this."""
        self.fall_silent()

    def fall_silent(self) -> None:
        """Print no more, and redirect standard error: Python's last flush would fail and replace the exit code."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


class Screen:
    """Lines and bars on standard error. Errors of writing are ignored: no run depends on the output."""

    def __init__(self) -> None:
        """Prepare the screen; nothing is drawn yet."""
        self.console = _Console(stderr=True, highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._bars = Progress(
            TextColumn("         {task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}", style="dim"),
            console=self.console,
            transient=True,
        )
        self._works: dict[str, TaskID] = {}
        self._last_line: dict[str, float] = {}

    def say(self, text: str, style: str = "") -> None:
        """Print one line with the seconds since the start."""
        elapsed = time.monotonic() - self._started
        with self._or_silent():
            self.console.print(Text(f"{elapsed:7.1f}s ", style="dim") + Text(text, style=style))

    def show(self, now: progress.TaskProgress) -> None:
        """Move the bar of this work; it disappears when the work is done."""
        if not self.console.is_terminal:
            # A log keeps every line, so it gets one only now and then, and none for work that is soon done.
            moment = time.monotonic()
            last = self._last_line.setdefault(now.work, moment)
            if moment - last >= LINE_EVERY_SECONDS:
                self._last_line[now.work] = moment
                self.say(f"{now.work}: {now.done:.0f}/{now.total:.0f}  {now.detail}")
            return

        with self._or_silent():
            if now.work not in self._works:
                self._works[now.work] = self._bars.add_task(now.work, total=None, detail="")
                self._bars.start()
            bar = self._works[now.work]
            # A total of 0 is not known yet; rich shows a bar without a total as one that pulses.
            self._bars.update(
                bar, completed=int(now.done), total=int(now.total) or None, detail=now.detail
            )
            if now.total and now.done >= now.total:
                self._bars.remove_task(self._works.pop(now.work))

    @contextmanager
    def _or_silent(self) -> Generator[None]:
        try:
            yield
        except OSError:  # a full disk or a closed terminal
            self.console.fall_silent()

    def close(self) -> None:
        """Remove the bars."""
        with self._or_silent():
            self._bars.stop()


class _RunLogs(logging.Handler):
    """Shows the logs of flows and tasks, without those of Prefect's engine about itself."""

    def __init__(self, screen: Screen) -> None:
        """Write to this screen."""
        super().__init__(logging.INFO)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        """Show one line of a flow or task."""
        if not record.pathname.startswith(PREFECT_FOLDER):
            style = "yellow" if record.levelno >= logging.WARNING else ""
            self._screen.say(record.getMessage(), style)


def show_runs_on(screen: Screen) -> None:
    """Let the flows' own log lines and progress appear on the screen, and silence Prefect's console output."""
    names = [None, *(name for name in logging.root.manager.loggerDict if "prefect" in name)]
    for logger in map(logging.getLogger, names):
        for handler in list(logger.handlers):
            if isinstance(handler, PrefectConsoleHandler):
                logger.removeHandler(handler)
    # Without any handler Python would print warnings to standard error itself, across the bars.
    logging.root.addHandler(logging.NullHandler())
    for name in SHOWN_LOGGERS:
        logging.getLogger(name).addHandler(_RunLogs(screen))
    progress.listen(screen.show)
