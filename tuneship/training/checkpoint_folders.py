"""The names of a job's checkpoints in their folder, for code that copies them. Loads no torch. See `checkpoints.py`."""

import os
import shutil
from pathlib import Path

from tuneship.training.spec import FORMAT_FILE

STEP = "step-"
# The latest, and the one before it in case the disk damages the latest.
KEPT = 2


def step_folder(folder: Path, step: int) -> Path:
    """The folder of one checkpoint. Names in alphabetical order are in the order of the steps."""
    return folder / f"{STEP}{step:09}"


def latest_step(folder: Path) -> int:
    """The step of the latest checkpoint in a folder; 0 without one."""
    found = folder.glob(f"{STEP}*")
    return max((int(path.name.removeprefix(STEP)) for path in found), default=0)


def give_second_names(folder: Path, step: int, target: Path) -> bool:
    """Hard-link a checkpoint's files and the file of the number format into a new folder; False if the checkpoint is
    gone.

    The training process removes all but its newest two, and who copies them may take longer than these last. Raises
    `OSError`.
    """
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(step_folder(folder, step), target, copy_function=_link)
        _link(folder / FORMAT_FILE, target / FORMAT_FILE)
    except (FileNotFoundError, shutil.Error):
        return False
    return True


def put_in_place(arrived: Path, folder: Path, step: int) -> None:
    """Publish a folder with a checkpoint's files as a checkpoint, with one rename. Raises `OSError`."""
    number_format = arrived / FORMAT_FILE
    if number_format.exists():
        number_format.replace(folder / FORMAT_FILE)
    final = step_folder(folder, step)
    shutil.rmtree(final, ignore_errors=True)
    arrived.rename(final)


def arriving_folder(folder: Path, step: int) -> Path:
    """Make an empty folder for the files of a checkpoint; the training process removes one that is left there."""
    arriving = folder / f".tmp-{STEP}{step}"
    shutil.rmtree(arriving, ignore_errors=True)
    arriving.mkdir(mode=0o700, parents=True)
    return arriving


def _link(source: "str | Path", target: "str | Path") -> None:
    """Give a file a second name, or copy it where that is impossible. Raises `OSError`."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
