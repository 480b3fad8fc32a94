"""A process gives way to others of the machine, also where the kernel shares the processor among sessions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuneship.host.priority import AUTOGROUP

PROGRAM = """
import os
from tuneship.host.priority import lower_priority
from tests.unit.host.test_priority import niceness_of_group

if {first}:
    os.nice({first})
before = niceness_of_group()
lower_priority(5)
print(os.getpriority(os.PRIO_PROCESS, 0), before, niceness_of_group())
"""


def niceness_of_group() -> str:
    """As the kernel says it; "none" where this process is in no group of its session."""
    words = AUTOGROUP.read_text().split() if AUTOGROUP.exists() else []
    return words[-1] if words else "none"


def lowered(first: int, *, own_session: bool) -> list[str]:
    command = [sys.executable, "-c", PROGRAM.format(first=first)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
        start_new_session=own_session,
    )
    return done.stdout.split()


@pytest.mark.parametrize(("first", "then"), [(0, 5), (9, 9)])
def test_a_session_of_its_own_is_lowered_as_a_whole(first: int, then: int) -> None:
    expected = str(max(then, os.getpriority(os.PRIO_PROCESS, 0) + first))
    process, before, group = lowered(first, own_session=True)
    assert process == expected
    assert group == ("none" if before == "none" else expected)


def test_the_session_of_others_is_left_alone() -> None:
    process, before, group = lowered(0, own_session=False)
    assert int(process) == max(5, os.getpriority(os.PRIO_PROCESS, 0))
    assert before == group == niceness_of_group()
