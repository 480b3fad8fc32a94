"""Whether packages can be downloaded: without the package index, tests of installations are skipped."""

import subprocess
import sys
from functools import cache

import pytest

# A small package that every package index has.
PROBE = "six"


def need_package_index() -> None:
    """Skip the test where no package index can be reached; where one can, whatever is missing is a defect."""
    if not _is_reachable():
        pytest.skip("no package index can be reached")


@cache
def _is_reachable() -> bool:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "index",
        "versions",
        PROBE,
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
