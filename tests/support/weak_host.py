"""Runs a command as on a weaker host: the kernel refuses something to the command and its children.

`python -m tests.support.weak_host COMMAND ARGUMENTS...`: no process may set a filter of system calls, as on some
container hosts. With `--no-landlock` before the command: the kernel has no Landlock, as older ones have none.
"""

import errno
import os
import platform
import sys

from tuneship.runtime import isolation
from tuneship.runtime.landlock import CREATE_RULESET
from tuneship.runtime.system_calls import (
    ALLOW,
    JUMP_IF_EQUAL,
    LOAD,
    NUMBER_AT,
    RETURN,
    UNKNOWN,
    Instruction,
    packed,
)

CALLS = {"x86_64": (157, 317), "aarch64": (167, 277)}
"""`prctl` and `seccomp`."""
FIRST_ARGUMENT_AT = 16
"""Where `struct seccomp_data` holds the lower half of a call's first argument."""


def forbid_filters() -> None:
    """`seccomp` fails, and of `prctl` what sets a filter."""
    prctl, seccomp = CALLS[platform.machine()]
    refuse = 0x00050000 | errno.EPERM
    _set_filter(
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_IF_EQUAL, 4, 0, seccomp),
        (JUMP_IF_EQUAL, 0, 2, prctl),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (JUMP_IF_EQUAL, 1, 0, isolation.PR_SET_SECCOMP),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, refuse),
    )


def forbid_landlock() -> None:
    """No set of rules can be made; nobody is told a version."""
    _set_filter(
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_IF_EQUAL, 1, 0, CREATE_RULESET),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, UNKNOWN),
    )


def _set_filter(*code: Instruction) -> None:
    isolation._prctl(isolation.PR_SET_NO_NEW_PRIVS, 1)
    isolation.set_filter(packed(list(code)))


if __name__ == "__main__":
    command = sys.argv[1:]
    if command[0] == "--no-landlock":
        forbid_landlock()
        command = command[1:]
    else:
        forbid_filters()
    os.execv(command[0], command)  # noqa: S606 - the test's own command
