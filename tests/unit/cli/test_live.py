"""Live pictures: where they are shown, and what they are made of."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from tests.support.terminals import screen_of
from tuneship.cli.live import Picture, flowed, in_minutes, shows_pictures, sparkline


class Terminal(io.StringIO):
    """A file that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "shows"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "TTY_INTERACTIVE": "0"}, False),
    ],
)
def test_a_picture_needs_a_terminal_that_moves_its_cursor(
    environment: dict[str, str], shows: bool
) -> None:
    assert shows_pictures(Console(file=Terminal(), _environ=environment)) is shows


def test_a_file_gets_no_picture_even_where_colours_are_forced() -> None:
    console = Console(file=io.StringIO(), _environ={"TERM": "xterm", "FORCE_COLOR": "1"})
    assert console.is_terminal
    assert not shows_pictures(console)


def test_a_terminal_without_unicode_gets_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Terminal, "encoding", "iso-8859-1")
    assert not shows_pictures(Console(file=Terminal(), _environ={"TERM": "xterm"}))


def test_a_sparkline_shows_means_between_the_lowest_and_the_highest() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([8, 8, 1, 1], 2) == "█▁"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([], 10) == ""
    assert len(sparkline(list(range(1000)), 17)) == 17


def test_pieces_flow_into_as_many_lines_as_they_need() -> None:
    pieces = [Text("one"), Text("two"), Text("three")]
    assert flowed(pieces, 20).plain == "one  two  three"
    assert flowed(pieces, 9).plain == "one  two\nthree"
    assert flowed(pieces, 1).plain == "one\ntwo\nthree"


def test_a_duration_has_two_units_at_most() -> None:
    assert [in_minutes(one) for one in (0.4, 59.9, 61, 3599, 7320)] == [
        *("0 s", "59 s", "1 min 1 s", "59 min 59 s", "2 h 2 min"),
    ]


def test_a_terminal_of_another_width_shows_the_picture_once() -> None:
    file = Terminal()
    console = Console(file=file, width=40, height=5, _environ={"TERM": "xterm"})
    with Picture(console, lambda: Text(f"<{'x' * (console.width - 2)}>"), stays=True) as picture:
        picture.refresh()
        console.print("a line above")
        console.width = 20
        picture.refresh()
        picture.refresh()
    lines = screen_of(file.getvalue())
    # A terminal of 20 columns wraps what was drawn for 40; it is not drawn over.
    assert lines.count(f"<{'x' * 18}>") == 1
    assert "a line above" in lines
    assert file.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"
