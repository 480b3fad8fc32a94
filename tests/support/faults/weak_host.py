"""Run a command as if the kernel lacked a security feature, for the command and its children.

`python -m tests.support.faults.weak_host COMMAND ARGUMENTS...` forbids filters of system calls, as some container hosts
do. With `--no-landlock` before the command, Landlock is missing instead, as in older kernels.
"""

import errno
import os
import platform
import sys

from tuneship.isolation import isolation
from tuneship.isolation.landlock import CREATE_RULESET
from tuneship.isolation.system_calls import (
    ALLOW,
    JUMP_IF_EQUAL,
    LOAD,
    NUMBER_AT,
    RETURN,
    UNKNOWN,
    Instruction,
    packed,
)

# Numbers of the system calls `prctl` and `seccomp`.
CALLS = {"x86_64": (157, 317), "aarch64": (167, 277)}
# Offset of the lower half of a call's first argument in `struct seccomp_data`.
FIRST_ARGUMENT_AT = 16


def forbid_filters() -> None:
    """Make `seccomp` fail, and `prctl` if it would set a filter."""
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
    """Make Landlock unavailable: no rules can be created, and no version is reported."""
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
