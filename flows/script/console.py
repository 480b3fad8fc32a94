"""The screen of a script while it runs: a live picture on a terminal, else lines; and what feeds it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import prefect
from prefect.logging.handlers import PrefectConsoleHandler

from flows.script.lines import Lines
from flows.script.picture import ReleasePicture
from flows.shared.release_events import follow
from tuneship.cli.live import shows_pictures
from tuneship.prefect import progress

PREFECT_FOLDER = str(Path(prefect.__file__).parent)
SHOWN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


class Screen(Protocol):
    """Shows a run: `Lines`, or `ReleasePicture`."""

    def say(self, text: str, style: str = "") -> None:
        """Show a line that stays."""
        ...

    def wait(self, text: str) -> None:
        """Show what the script waits for."""
        ...

    def serves_until_the_end(self) -> None:
        """Note that the service ends with this run."""
        ...

    def log(self, text: str, level: int) -> None:
        """Take a line that a flow or a task has logged."""
        ...

    def show(self, now: progress.TaskProgress) -> None:
        """Take the progress of a task."""
        ...

    def stopping(self) -> None:
        """Note that a signal stops the run; called by the signal's handler."""
        ...

    def close(self, result: Mapping[str, Any] | None) -> None:
        """End, with the run's result; None: the script says itself how it ended."""
        ...


def open_screen(stages: Sequence[str], is_plain: bool) -> Screen:
    """A picture of these stages where standard error is a terminal that can show one, else lines."""
    lines = Lines()
    if not stages or is_plain or not shows_pictures(lines.console):
        return lines
    picture = ReleasePicture(lines, stages)
    follow(picture)
    return picture


class _RunLogs(logging.Handler):
    """Shows the logs of flows and tasks, without those of Prefect's engine about itself."""

    def __init__(self, screen: Screen) -> None:
        """Show them on this screen."""
        super().__init__(logging.INFO)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        """Show one line of a flow or task."""
        if not record.pathname.startswith(PREFECT_FOLDER):
            self._screen.log(record.getMessage(), record.levelno)


def show_runs_on(screen: Screen) -> None:
    """Let the flows' own log lines and progress appear on the screen, and silence Prefect's console output."""
    names = [None, *(name for name in logging.root.manager.loggerDict if "prefect" in name)]
    for logger in map(logging.getLogger, names):
        for handler in list(logger.handlers):
            if isinstance(handler, PrefectConsoleHandler):
                logger.removeHandler(handler)
    # Without any handler Python would print warnings to standard error itself, across the picture.
    logging.root.addHandler(logging.NullHandler())
    for name in SHOWN_LOGGERS:
        logging.getLogger(name).addHandler(_RunLogs(screen))
    progress.listen(screen.show)
