"""The file of an upload, and a bar that shows how much of it has been sent."""

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
def progress_bar(name: str) -> Generator[Callable[[int, int], None] | None]:
    """A function that moves a bar on standard error; None if standard error is no terminal."""
    from rich.console import Console  # noqa: PLC0415 - starts slowly
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    # Left alone: what is written to standard output would come out on the console of the bar.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(one_line(name).replace("[", r"\["), total=None)

        def show(sent: int, size: int) -> None:
            # The service checks every line before it answers, which may take longer than sending them.
            text = "the service is checking it" if sent >= size else None
            bar.update(task, completed=sent, total=size, description=text)

        yield show
