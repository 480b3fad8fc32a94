"""A process gives way to others of the machine, also where the kernel shares the processor among sessions."""

import os
import subprocess
import sys

import pytest

from tuneship.host.priority import AUTOGROUP

PROGRAM = """
import os
from pathlib import Path
from tuneship.host.priority import AUTOGROUP, lower_priority

if {first}:
    os.nice({first})
lower_priority(5)
group = AUTOGROUP.read_text().split()[-1] if AUTOGROUP.exists() else "none"
print(os.getpriority(os.PRIO_PROCESS, 0), group)
"""


def lowered(first: int, *, own_session: bool) -> list[str]:
    command = [sys.executable, "-c", PROGRAM.format(first=first)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, start_new_session=own_session
    )
    return done.stdout.split()


@pytest.mark.parametrize(("first", "then"), [(0, 5), (9, 9)])
def test_a_session_of_its_own_is_lowered_as_a_whole(first: int, then: int) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    expected = max(then, before + first)
    group = str(expected) if AUTOGROUP.exists() else "none"
    assert lowered(first, own_session=True) == [str(expected), group]


def test_the_session_of_others_is_left_alone() -> None:
    before = AUTOGROUP.read_text().split()[-1] if AUTOGROUP.exists() else "none"
    process, group = lowered(0, own_session=False)
    assert (int(process), group) == (max(5, os.getpriority(os.PRIO_PROCESS, 0)), before)
