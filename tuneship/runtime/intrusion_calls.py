"""How a way of an intruder is tried, and how it says that it failed: it raises `OSError`."""

import errno
import platform

from tuneship.runtime.kernel import system_call
from tuneship.runtime.system_calls import CONDITIONAL, REFUSED, SIGNALS

REFUSED_BY = {errno.EPERM, errno.EACCES, errno.ENOSYS}


def call(name: str, *arguments: object) -> int:
    """A system call by its name."""
    which = ("x86_64", "aarch64").index(platform.machine())
    found = (REFUSED.get(name) or CONDITIONAL.get(name) or SIGNALS[name])[which]
    if not isinstance(found, int):
        raise OSError(errno.ENOSYS, name)
    return system_call(found, *arguments)


def reaches(name: str, *arguments: object) -> None:
    """Make a call whose arguments make no sense: that the kernel looked at them is enough."""
    try:
        call(name, *arguments)
    except OSError as error:
        if error.errno in REFUSED_BY:
            raise


def refuse(*, when: bool) -> None:
    """Fail the attempt."""
    if when:
        raise OSError(errno.EPERM, "refused")
