"""Pictures on a terminal that are drawn again while something goes on: when they are shown, and what they are made of.

Loaded only when one is drawn, because rich starts slowly. Nothing here reads a terminal's background: the colours are
those of its own palette, and every colour stands beside a shape or a word that says the same.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from rich.console import Console, ConsoleRenderable, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
)
from rich.text import Text

DRAWN_PER_S = 2
LEVELS = "▁▂▃▄▅▆▇█"
# Dim, and no grey of the palette: some palettes have it as their background.
LOSS_STYLE, WAITING_STYLE = "cyan", "dim"


def shows_pictures(console: Console) -> bool:
    """Whether this console is a terminal that can move the cursor and show the characters of a picture."""
    is_terminal = console.file.isatty() and console.is_interactive and not console.is_dumb_terminal
    return is_terminal and console.encoding.lower().startswith("utf")


class Picture(Live):
    """A live display on one console that survives a terminal of another width, and one that is gone."""

    def __init__(
        self,
        console: Console,
        draw: Callable[[], RenderableType],
        *,
        stays: bool = False,
        redirects: bool = True,
    ) -> None:
        """Draw what `draw` returns, twice a second.

        `stays`: whether the last frame is left on the terminal. `redirects`: whether what another part of the program
        prints on the same terminal comes out above the picture.
        """
        super().__init__(
            console=console,
            get_renderable=draw,
            refresh_per_second=DRAWN_PER_S,
            transient=not stays,
            redirect_stdout=redirects and sys.stdout.isatty(),
            redirect_stderr=redirects,
        )
        self._width = console.width

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Begin on an empty screen after a change of its width: where its old lines are now, nobody knows."""
        if (width := self.console.width) != self._width:
            self._width = width
            # They are moved out of the screen, not erased, as there may be more than this picture.
            scrolled = Text("\n" * self.console.height)
            renderables = [scrolled, Control.clear(), Control.home(), *renderables]
        return super().process_renderables(renderables)

    def refresh(self) -> None:
        """Draw; a terminal that is gone stops the drawing and nothing else."""
        try:
            super().refresh()
        except OSError:
            self.console.quiet = True


class TimeLeft(ProgressColumn):
    """The time that is left, in words; nothing where it is not known."""

    def render(self, task: Task) -> Text:
        """The time left of one work."""
        seconds = task.time_remaining
        if seconds is None or task.finished:
            return Text("")
        return Text(f"{in_minutes(seconds)} left")


class Amount(ProgressColumn):
    """How much is done, in bytes for a work with the field `is_bytes`, else in units; empty while no total is known."""

    def __init__(self) -> None:
        """Prepare both forms."""
        super().__init__()
        self._bytes, self._units = DownloadColumn(), MofNCompleteColumn(separator=" of ")

    def render(self, task: Task) -> Text:
        """The amount of one work."""
        if task.total is None:
            return Text("")
        return self._bytes.render(task) if task.fields.get("is_bytes") else self._units.render(task)


def bars() -> Progress:
    """Bars of works with their amount and the time left, to be drawn inside a picture."""
    bar = BarColumn(None, WAITING_STYLE, "cyan", "green", "cyan")
    return Progress(bar, Amount(), TimeLeft(), auto_refresh=False, expand=True)


def in_minutes(seconds: float) -> str:
    """A duration for people: `42 s`, `3 min 5 s`, `2 h 10 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of at most `width` characters, each the mean of neighbouring values; the lowest one is at the bottom."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * place // count for place in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    lowest, highest = min(means), max(means)
    steps = (highest - lowest) / (len(LEVELS) - 1)
    return "".join(LEVELS[round((one - lowest) / steps) if steps else 0] for one in means)


def flowed(pieces: Iterable[Text], width: int, gap: int = 2) -> Text:
    """Pieces one behind the other, in as many lines as this width needs; no piece is broken."""
    lines = [Text()]
    for piece in pieces:
        if lines[-1] and lines[-1].cell_len + gap + piece.cell_len > width:
            lines.append(Text())
        if lines[-1]:
            lines[-1].append(" " * gap)
        lines[-1].append_text(piece)
    return Text("\n").join(lines)
