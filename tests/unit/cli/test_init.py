"""`tuneship init` writes a project whole or not at all, and never over something."""

from collections.abc import Generator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tuneship.cli.commands.init import NameTaken, _move, write_project
from tuneship.cli.main import app

PIN = "tuneship[service]==1.2.3\n"


@pytest.fixture
def shipped(tmp_path: Path) -> Generator[Path]:
    """A small project as an installation holds it: read-only, with byte code beside the sources."""
    folder = tmp_path / "shipped"
    for name in ("flows/guard.py", "flows/__pycache__/guard.pyc", "README.md", "prefect.yaml"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
        file.chmod(0o444)
    for inner in (folder / "flows" / "__pycache__", folder / "flows", folder):
        inner.chmod(0o555)
    yield folder
    for inner in (folder, *folder.rglob("*")):
        inner.chmod(0o755)


def names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*")}


WHOLE = {"flows", "flows/guard.py", "README.md", "prefect.yaml", "requirements.txt"}


@pytest.mark.parametrize("is_there", [False, True])
def test_a_new_and_an_empty_folder_get_the_whole_project(
    shipped: Path, tmp_path: Path, is_there: bool
) -> None:
    folder = tmp_path / "place" / "shop"
    folder.parent.mkdir()
    if is_there:
        folder.mkdir()
    write_project(shipped, folder, PIN)
    assert names(folder) == WHOLE
    assert (folder / "requirements.txt").read_text() == PIN
    folders = (folder, folder / "flows")
    assert all(one.stat().st_mode & 0o200 for one in (folder / "README.md", *folders)), (
        "the project is its owner's to change"
    )
    assert names(folder.parent) == {"shop", *(f"shop/{name}" for name in WHOLE)}, "nothing is left"


def test_a_folder_with_other_things_keeps_them(shipped: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    (folder / ".git").mkdir(parents=True)
    write_project(shipped, folder, PIN)
    assert names(folder) == WHOLE | {".git"}


@pytest.mark.parametrize("name", ["flows", "prefect.yaml", "requirements.txt"])
def test_a_name_that_is_taken_is_refused_and_nothing_is_written(
    shipped: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "nowhere")  # a link that leads nowhere is a name, too
    with pytest.raises(NameTaken, match=f"there is already {name}"):
        write_project(shipped, folder, PIN)
    assert names(folder) == {name}


def test_a_move_that_fails_takes_back_those_before(shipped: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    (folder / ".git").mkdir(parents=True)
    before = names(shipped)
    with pytest.raises(FileNotFoundError):
        _move(["README.md", "flows", "missing", "prefect.yaml"], shipped, folder)
    assert (names(shipped), names(folder)) == (before, {".git"})


@pytest.mark.parametrize("place", ["missing/shop", "a_file"])
def test_a_place_that_is_no_folder_is_an_error(shipped: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "a_file").write_text("")
    with pytest.raises(OSError, match=place.partition("/")[0]):
        write_project(shipped, tmp_path / place, PIN)


def test_a_checkout_says_that_it_is_a_project(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", str(tmp_path / "shop")])
    assert done.exit_code == 1
    assert "this is a checkout" in done.stderr
    assert not (tmp_path / "shop").exists()
