"""`tuneship init`: writes the pipeline (flows, tasks, deployments, examples) into a folder of the user."""

import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from tuneship.cli.common import fail
from tuneship.host.durable import flush

SHIPPED = Path(__file__).parents[2] / "project"

app = typer.Typer()


class NameTaken(Exception):
    """The folder already holds something under a name of the project."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder, or one without these names.")],
) -> None:
    """Write flows, tasks, deployments and examples into a folder; its README.md has the next commands."""
    if not SHIPPED.is_dir():
        if (SHIPPED.parents[1] / "prefect.yaml").is_file():
            fail("this is a checkout of tuneship, which is such a project itself: work in it")
        fail("this needs `pip install tuneship`: tuneship-client holds no pipeline")
    installed = version("tuneship")
    try:
        write_project(SHIPPED, folder.resolve(), f"tuneship[service]=={installed}\n")
    except NameTaken as taken:
        fail(f"{folder}: {taken}; name a folder without it")
    except OSError as error:
        place = folder if folder.parent.is_dir() else folder.parent
        fail(f"{place}: {error.strerror or 'cannot be written'}; nothing was written")
    typer.echo(f"{folder}: the pipeline of tuneship {installed}; next: {folder / 'README.md'}")


def write_project(shipped: Path, folder: Path, requirements: str) -> None:
    """Copy a project into a folder, whole or not at all. Raises `NameTaken` and OSError."""
    names = sorted({file.name for file in shipped.iterdir()} | {"requirements.txt"})
    for name in names:
        if (folder / name).exists() or (folder / name).is_symlink():
            raise NameTaken(f"there is already {name}")
    is_new = not folder.exists()
    place = folder.parent if is_new else folder
    next(place.iterdir(), None)  # fails here, with its name, where that is no folder
    # On the same disk as its place, so that renames are all that is left to do.
    stage = Path(tempfile.mkdtemp(prefix=".tuneship-init-", dir=place))
    try:
        made = stage / "project"
        shutil.copytree(
            shipped,
            made,
            ignore=shutil.ignore_patterns("__pycache__"),
            copy_function=shutil.copyfile,
        )
        # An installation may be read-only, a project is not.
        for one in (made, *made.rglob("*")):
            if one.is_dir():
                one.chmod(0o755)
        (made / "requirements.txt").write_text(requirements)
        for path in (*made.rglob("*"), made):
            flush(path)
        if is_new:
            made.rename(folder)
        else:
            _move(names, made, folder)
        flush(place)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _move(names: Sequence[str], made: Path, folder: Path) -> None:
    """Move the names into a folder that holds other things; if one cannot be moved, move the others back.

    A kill between two renames leaves the rest in `.tuneship-init-...`, and the next run names what is there.
    """
    moved: list[str] = []
    try:
        for name in names:
            (made / name).rename(folder / name)
            moved.append(name)
    except BaseException:
        for name in moved:
            (folder / name).rename(made / name)
        raise
