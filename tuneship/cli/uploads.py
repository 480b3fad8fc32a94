"""The file of an upload, and a bar that shows how much of it has been sent, or how much of a download has come."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tuneship.cli.fields import BadField
from tuneship.cli.output import one_line


@contextmanager
def opened_file(path: Path, columns: str | None) -> Generator[BinaryIO]:
    """The bytes of an upload, as JSON Lines; CSV and Parquet are converted. Raises `BadField`.

    `columns`: which column holds which field, as it was given.
    """
    from tuneship.client import SourceError, parse_columns  # noqa: PLC0415 - starts slowly
    from tuneship.client.uploads import upload_file  # noqa: PLC0415

    try:
        chosen = None if columns is None else parse_columns(columns)
    except SourceError as error:
        raise BadField(f"--{error}") from None
    try:
        with upload_file(path, chosen) as (opened, fill):
            fill()
            yield opened
    except SourceError as error:
        raise BadField(f"FILE: {error}") from None


@contextmanager
def opened_folder(path: Path) -> Generator[BinaryIO]:
    """The archive of an adapter's folder. Raises `BadField`."""
    from tuneship.client import SourceError  # noqa: PLC0415 - starts slowly
    from tuneship.client.archives import archive_of  # noqa: PLC0415

    try:
        with archive_of(path) as archive:
            yield archive
    except SourceError as error:
        raise BadField(f"FOLDER: {error}") from None


@contextmanager
def progress_bar(name: str, afterwards: str = "") -> Generator[Callable[[int, int], None] | None]:
    """A function that moves a bar of bytes on standard error; None if that cannot show one.

    `afterwards`: what happens once all bytes are there.
    """
    from rich.console import Console, Group  # noqa: PLC0415 - starts slowly
    from rich.text import Text  # noqa: PLC0415

    from tuneship.cli.live import Picture, bars, shows_pictures  # noqa: PLC0415

    console = Console(stderr=True)
    if not shows_pictures(console):
        yield None
        return
    bar = bars()
    task = bar.add_task("", total=None, is_bytes=True)
    head = Text(one_line(name))

    def show(done: int, size: int) -> None:
        if afterwards:
            head.plain = f"{one_line(name)}: {afterwards}" if done >= size else one_line(name)
        bar.update(task, completed=done, total=size or None)

    # What is written to standard output would come out on the console of the bar.
    with Picture(console, lambda: Group(head, bar), redirects=False):
        yield show
