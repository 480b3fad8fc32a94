"""A release on a terminal as one live picture: its stages, the loss, the split, the gates, and the page of the release.

It shows the lines of the release's records and the progress of tasks, as `picture_state.py` folds them; of the log only
warnings, above the picture. From a signal on, every line of the log is printed, and the picture is drawn no more.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from threading import RLock
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from flows.script.lines import Lines
from flows.script.picture_state import STAGE_OF_WORK, PictureState, RolloutGate, time_of
from tuneship.cli.live import (
    LOSS_STYLE,
    WAITING_STYLE,
    Picture,
    bars,
    flowed,
    in_minutes,
    sparkline,
)
from tuneship.cli.output import one_line
from tuneship.contract.common import count
from tuneship.gates.reports.words import OUTCOMES, in_words
from tuneship.prefect.progress import TaskProgress

MARKS = {
    "waiting": ("○", WAITING_STYLE),
    "running": ("●", "bold cyan"),
    "done": ("✓", "green"),
    "skipped": ("-", WAITING_STYLE),
    "stopped": ("✗", "bold red"),
}
GATE_STYLES = {"proven": "green", "harm": "bold red", "hold": "magenta", "open": "default"}
CHECK_MARKS = {
    "reject": ("✗", "bold red"),
    "hold": ("✗", "magenta"),
    "warn": ("!", "magenta"),
}
# What a stage waits for while no task of it reports progress.
WAITS = {
    "tune": "waiting for the job to start",
    "deploy": "waiting for the deployments to run",
    "shift": "forecasting the rollout from the traffic so far",
}
LABEL_WIDTH = 10
# The evidence of a gate is shorter where it lets two gates stand side by side.
EVIDENCE_CELLS, SHORT_EVIDENCE_CELLS, SPLIT_CELLS = 8, 6, 32


class ReleasePicture:
    """The picture of one run, on the console of its lines. `stages`: those of the run."""

    def __init__(self, lines: Lines, stages: Sequence[str]) -> None:
        """Begin to draw."""
        self._lines = lines
        self.state = PictureState(stages)
        self._began = False
        self._started = time.monotonic()
        self._shift_began: float | None = None
        self._waits_for, self._waits_since = "", self._started
        self._bars = bars()
        self._work: tuple[TaskProgress, TaskID] | None = None
        self._url: str | None = None
        self._ends_with_run = False
        self._is_stopping = False
        self._lock = RLock()
        self._live = Picture(lines.console, lambda: self, stays=True)
        with lines.or_silent():
            self._live.start(refresh=True)

    # What the script says.

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the picture."""
        self._end_if_stopping()
        self._lines.say(text, style)

    def wait(self, text: str) -> None:
        """Show what the script waits for until something else happens."""
        self._end_if_stopping()
        if self._is_stopping:
            self._lines.wait(text)
        with self._lock:
            self._waits_for, self._waits_since = text, time.monotonic()

    def serves_until_the_end(self) -> None:
        """Note that the service ends with this run, so that its pages cannot be opened afterwards."""
        self._ends_with_run = True

    def log(self, text: str, level: int) -> None:
        """Print a warning above the picture, and after a signal every line."""
        self._end_if_stopping()
        if self._is_stopping or level >= logging.WARNING:
            self._lines.log(text, level)

    def show(self, now: TaskProgress) -> None:
        """Move the bar of this work; it disappears when the work is done."""
        self._end_if_stopping()
        with self._lock:
            self._began, self._waits_for = True, ""
            self.state.progress(now)
            # Steps of the split are no amount of work: the bar would promise an end.
            if now.work not in STAGE_OF_WORK:
                return
            if self._work is None or self._work[0].work != now.work:
                self._forget_work()
                task = self._bars.add_task("", total=None, is_bytes=now.is_bytes)
                self._work = (now, task)
            bar = self._work[1]
            self._work = (now, bar)
            # A total of 0 is not known yet; rich shows a bar without a total as one that pulses.
            self._bars.update(bar, completed=int(now.done), total=int(now.total) or None)

    def stopping(self) -> None:
        """Note a signal. The handler may have interrupted a drawing, so the picture ends with the next line."""
        self._is_stopping = True

    def close(self, result: Mapping[str, Any] | None) -> None:
        """Leave the last picture on the terminal, and below it how the run ended; None: the script says it itself."""
        self._end_if_stopping()
        if self._is_stopping:
            return
        self._end()
        if result is None:
            return
        outcome = str(result.get("outcome"))
        self._lines.say(sentence_of(result), "bold green" if outcome == "promoted" else "bold")
        for name, label in (("report", "report"), ("model_card", "model card")):
            if result.get(name):
                self._lines.say(f"{label}: {result[name]}")
        if self._url is None:
            return
        if self._ends_with_run:
            page = self._url.partition("/console/")[2]
            self._lines.say(f"page: console/{page}, when the service runs again (`tuneship serve`)")
        else:
            self._lines.say(f"page: {self._url}")

    def _end_if_stopping(self) -> None:
        if self._is_stopping and self._live.is_started:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._waits_for = ""
            self._forget_work()
        # Nothing is left of a run that never began.
        self._live.transient = not self._began
        with self._lines.or_silent():
            self._live.stop()

    def _forget_work(self) -> None:
        if self._work is not None:
            self._bars.remove_task(self._work[1])
            self._work = None

    # What the records say.

    def line(self, fact: Mapping[str, Any], is_release: bool) -> None:
        """Take a line of a record."""
        with self._lock:
            self._began, self._waits_for = True, ""
            self.state.line(fact, is_release)
            if fact.get("kind") in ("trained", "baseline", "evaluation", "rollout", "ended"):
                self._forget_work()
            if self.state.running == "shift" and self._shift_began is None:
                self._shift_began = time.monotonic()

    def page(self, url: str) -> None:
        """Take the address of the release's page."""
        self._url = one_line(url)

    # The picture.

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw in the width of the terminal, whatever the line that is printed above asks for."""
        width = min(options.max_width, console.width)
        with self._lock:
            head = Text("release  ", style="bold")
            head.append(in_minutes(time.monotonic() - self._started), style=WAITING_STYLE)
            yield Text()
            yield from (head, self._chain(width), Text())
            grid = Table.grid(padding=(0, 1), expand=True)
            grid.add_column(width=LABEL_WIDTH, style=WAITING_STYLE, no_wrap=True)
            grid.add_column(ratio=1, overflow="fold", no_wrap=False)
            for label, row in self._rows(width - LABEL_WIDTH - 1):
                grid.add_row(label, row)
            yield grid

    def _chain(self, width: int) -> Text:
        pieces: list[Text] = []
        for name, state in self.state.states.items():
            mark, style = MARKS[state]
            pieces.append(Text(f"{mark} {name}", style=style))
        room = width - sum(piece.cell_len for piece in pieces)
        return flowed(pieces, width, 2 if room >= 2 * (len(pieces) - 1) else 1)

    def _rows(self, width: int) -> list[tuple[str, RenderableType]]:
        state = self.state
        rows: list[tuple[str, RenderableType]] = []
        if (now := self._now()) is not None:
            rows.append(("now", now))
        if self._work is not None:
            rows.append((self._work[0].work, self._bars))
        if state.examples is not None:
            training, validation = state.examples
            rows.append(
                ("data", Text(f"{count(training, 'example')}, {validation:,} for validation"))
            )
        if state.losses:
            rows.append(("loss", self._loss(width)))
        if state.checks:
            rows.append(("checks", self._checks(width)))
        if state.weight is not None:
            rows.append(("traffic", split_bar(state.weight, width)))
        if state.gates:
            rows.append(("gates", gates_table(state.gates, width)))
        if self._url is not None and self._live.is_started:
            rows.append(("page", Text(self._url, style=f"link {self._url}")))
        return rows

    def _now(self) -> Text | None:
        state = self.state
        if not self._live.is_started:
            return None
        if self._waits_for:
            return Text(f"{self._waits_for}: {in_minutes(time.monotonic() - self._waits_since)}")
        if state.asked_until is not None:
            until = time_of(state.asked_until)
            return Text(f"waiting for a person until {until}", style="bold magenta")
        if state.running in ("shift", "promote") and state.look:
            left = ""
            if state.running == "shift" and state.forecast_minutes and self._shift_began:
                seconds = 60 * state.forecast_minutes - (time.monotonic() - self._shift_began)
                left = f"; about {in_minutes(seconds)} left by the forecast" if seconds > 1 else ""
            return Text(state.look + left)
        if self._work is None:
            waits = WAITS.get(state.running or "")
            return Text(waits) if waits else None
        work = self._work[0]
        return Text(work.detail) if work.detail and not work.measures else None

    def _loss(self, width: int) -> Text:
        values = list(self.state.losses.values())
        words = f"  training {values[-1]:.3f}"
        if self.state.validation_loss is not None:
            words += f"  validation {self.state.validation_loss:.3f}"
        return Text.assemble((sparkline(values, max(8, width - len(words))), LOSS_STYLE), words)

    def _checks(self, width: int) -> Text:
        states = self.state.checks
        passed = sum(state == "pass" for state in states.values())
        pieces = [Text(f"✓ {passed} pass", style="green")] if passed else []
        for name, state in states.items():
            if state in CHECK_MARKS:
                mark, style = CHECK_MARKS[state]
                pieces.append(Text(f"{mark} {name}: {state}", style=style))
        return flowed(pieces, width)


def split_bar(candidate: int, width: int) -> Text:
    """The split as a bar: the baseline's share and then the candidate's, with their numbers."""
    words = f"  baseline {100 - candidate} %  candidate {candidate} %"
    cells = max(8, min(SPLIT_CELLS, width - len(words)))
    # No share of traffic is too small to be seen.
    filled = min(cells, max(round(cells * candidate / 100), 1 if candidate else 0))
    return Text.assemble(("░" * (cells - filled), WAITING_STYLE), ("█" * filled, "cyan"), words)


def gates_table(gates: Sequence[RolloutGate], width: int) -> Table:
    """The gates side by side, as many as fit: each with its evidence as a bar, and its state as a word."""
    name_width = max(len(gate.name) for gate in gates)
    around = name_width + 1 + 1 + len("proven") + 2
    is_narrow = (width + 2) // (around + EVIDENCE_CELLS) < 2
    bar = SHORT_EVIDENCE_CELLS if is_narrow else EVIDENCE_CELLS
    count = max(1, (width + 2) // (around + bar))
    table = Table.grid(padding=(0, 2, 0, 0))
    cells: list[Text] = []
    for gate in gates:
        style = GATE_STYLES.get(gate.state, "default")
        filled = round(bar * gate.evidence)
        cell = Text(f"{gate.name:<{name_width}} ")
        cell.append("━" * filled, style)
        cell.append("╌" * (bar - filled), WAITING_STYLE)
        cells.append(cell.append(f" {gate.state:<6}", style))
    for start in range(0, len(cells), count):
        table.add_row(*cells[start : start + count])
    return table


def sentence_of(result: Mapping[str, Any]) -> str:
    """How a run ended, in one sentence."""
    outcome, reason = str(result.get("outcome")), str(result.get("reason", "none"))
    what = outcome.replace("_", " ")
    if meaning := OUTCOMES.get(outcome):
        what += f": {meaning[0].lower()}{meaning[1:].rstrip('.')}"
    if message := result.get("message"):  # of a run that had nothing to do
        return f"{what}: {message}."
    if gate := result.get("gate"):
        return f"{what} (refused by gate {gate})."
    return f"{what}." if reason == "none" else f"{what} ({in_words(reason).replace('`', '')})."
