"""Prints the tests for `make quick`: the guards, changed tests, and the folders of the packages that were changed.

python scripts/touched_tests.py HEAD~1      # since that commit, with what is not committed yet
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUARDS = (
    "tests/unit/test_docs.py",
    "tests/unit/test_plain_language.py",
    "tests/unit/contract/test_guards.py",
)


def touched(files: Iterable[str]) -> list[str]:
    """The guards, changed tests, and the folders of tests that mirror the packages of these files."""
    found = set(GUARDS)
    for file in files:
        match Path(file).parts:
            case ("tests", *_, name) if name.startswith("test_"):
                found.add(file)
            case ("tuneship", "service", room, _, *_):
                found.add(f"tests/service/{room}")
            case ("tuneship", room, _, *_):
                found |= {f"tests/unit/{room}", f"tests/service/{room}"}
            case ("flows", room, _, *_):
                found.add(f"tests/flows/{room}")
            case ("tasks", *_):
                found.add("tests/unit/tasks")
            case _:
                pass
    return sorted(one for one in found if (ROOT / one).exists())


def changed_files(since: str) -> list[str]:
    """The files that differ from those of a commit, new ones among them."""
    commands = (
        ["git", "diff", "--name-only", since],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    return [
        file
        for command in commands
        for file in subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    ]


if __name__ == "__main__":
    print(*touched(changed_files(sys.argv[1])))
