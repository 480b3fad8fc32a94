"""Runs a command as on a host where no process may set a filter of system calls, as some container hosts are.

`python -m tests.service.weak_host COMMAND ARGUMENTS...`: the kernel itself refuses it, to the command and its children.
"""

import errno
import os
import platform
import struct
import sys

from tuneship.runtime import isolation

CALLS = {"x86_64": (157, 317), "aarch64": (167, 277)}
"""`prctl` and `seccomp`."""
FIRST_ARGUMENT_AT = 16
"""Where `struct seccomp_data` holds the lower half of a call's first argument."""


def forbid_filters() -> None:
    """`seccomp` fails, and of `prctl` what sets a filter."""
    prctl, seccomp = CALLS[platform.machine()]
    refuse = 0x00050000 | errno.EPERM
    code = [
        (isolation.LOAD, 0, 0, isolation.NUMBER_AT),
        (isolation.JUMP_IF_EQUAL, 4, 0, seccomp),
        (isolation.JUMP_IF_EQUAL, 0, 2, prctl),
        (isolation.LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (isolation.JUMP_IF_EQUAL, 1, 0, isolation.PR_SET_SECCOMP),
        (isolation.RETURN, 0, 0, isolation.ALLOW),
        (isolation.RETURN, 0, 0, refuse),
    ]
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    isolation._prctl(isolation.PR_SET_NO_NEW_PRIVS, 1)
    isolation._set_filter(program)


if __name__ == "__main__":
    forbid_filters()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - the test's own command
