"""Install earlier versions of tuneship, built as wheels from the history of this checkout."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, Starter
from tuneship.store.database.database import WORKS_WITH

GIT = shutil.which("git") or "git"
DATABASE = "tuneship/store/database/database.py"
MIGRATIONS = "tuneship/store/migrations/versions"


def starter_in(folder: Path) -> Starter:
    """Return a function that runs modules of the tuneship in a folder, with the libraries of this environment."""

    def started(module: str, *arguments: str, env: Mapping[str, str], **options: Any) -> Any:
        command = [sys.executable, "-m", module, *arguments]
        own = {**env, "PYTHONPATH": str(folder)}
        return subprocess.Popen(
            command, cwd=folder, env=own, stdout=subprocess.PIPE, text=True, **options
        )

    return started


def oldest_that_works_beside(folder: Path) -> Starter:
    """Install the oldest version whose members can go on when this one has migrated their database.

    A version whose migrations were changed since, as only happens before a release, is none of them.
    """
    found = ""
    for commit in _commits(MIGRATIONS):
        if _schema(commit) < int(WORKS_WITH):
            break
        changed = ("diff", "--name-only", "--no-renames", "--diff-filter=MD", commit, "HEAD")
        if not _git(*changed, "--", MIGRATIONS):
            found = commit
    return _installed(found, folder)


def newest_that_cannot_go_on(folder: Path) -> Starter:
    """Install the newest version whose members cannot use the tables of this one."""
    older = (commit for commit in _commits(DATABASE) if _schema(commit) < int(WORKS_WITH))
    return _installed(next(older, ""), folder)


def _commits(path: str) -> Iterator[str]:
    """The commits that changed a path, newest first."""
    yield from _git("log", "--format=%H", "--", path).split()


def _schema(commit: str) -> int:
    found = re.search(r'^HEAD = "(\d+)"$', _git("show", f"{commit}:{DATABASE}"), re.MULTILINE)
    assert found is not None
    return int(found[1])


def _git(*arguments: str) -> str:
    done = subprocess.run([GIT, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the history of this checkout does not go back so far: {done.stderr[-200:]}")
    return done.stdout


def _installed(commit: str, folder: Path) -> Starter:
    """Build both wheels of a commit and unpack them."""
    if not commit:
        pytest.skip("the history of this checkout has no such version")
    source, target = folder / "source", folder / "installed"
    archive = folder / "source.zip"
    _git("archive", "--format=zip", f"--output={archive}", commit)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    for place in ("packaging/client", "."):
        done = subprocess.run(
            [*build, place], cwd=source, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(target)
    return starter_in(target)
