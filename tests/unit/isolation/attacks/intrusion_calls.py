"""Calls that attacks are made of; a refused one raises `OSError`."""

import errno
import platform

from tuneship.isolation.kernel import system_call
from tuneship.isolation.system_calls import CONDITIONAL, REFUSED, SIGNALS

REFUSED_BY = {errno.EPERM, errno.EACCES, errno.ENOSYS}


def call(name: str, *arguments: object) -> int:
    """Make a system call by its name."""
    which = ("x86_64", "aarch64").index(platform.machine())
    number = (REFUSED.get(name) or CONDITIONAL.get(name) or SIGNALS[name])[which]
    if not isinstance(number, int):
        raise OSError(errno.ENOSYS, name)
    return system_call(number, *arguments)


def reaches(name: str, *arguments: object) -> None:
    """Make a call with invalid arguments: it succeeds if the kernel looks at them at all."""
    try:
        call(name, *arguments)
    except OSError as error:
        if error.errno in REFUSED_BY:
            raise


def refuse(*, when: bool) -> None:
    """Raise the error of a refused attempt if `when` is true."""
    if when:
        raise OSError(errno.EPERM, "refused")
