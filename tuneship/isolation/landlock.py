"""Restricts the files that a process may open with Landlock, a feature of Linux, by its three system calls.

`confine` restricts the calling thread and all that it starts to the given files and folders, irrevocably; a further
call can only restrict more. The kernel then denies, by the version of its interface (ABI):

1. opening, making, removing and renaming files elsewhere, and looking into processes outside (`/proc/<pid>/mem`);
2. moving files between folders, unless both are writable; 3. truncating files; 4. TCP; 5. commands to devices;
6. signals to, and abstract sockets of, processes outside.

The numbers are the same on every processor. Landlock does not restrict calls that need no open file, such as reading
its size or changing its mode. `system_calls.py` refuses the second; the first cannot be prevented.
"""

import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tuneship.isolation.kernel import system_call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_FOR_VERSION, PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
MAKE_SYMLINK, REFER, TRUNCATE, DEVICE_COMMAND = 1 << 12, 1 << 13, 1 << 14, 1 << 15
# The rights to files, by the version that introduced them.
KNOWN_SINCE = {1: (1 << 13) - 1, 2: REFER, 3: TRUNCATE, 5: DEVICE_COMMAND}
# Rights that a rule for a file may name; the others are for folders.
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | DEVICE_COMMAND
BIND_AND_CONNECT_TCP, ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3

READ = READ_FILE | READ_DIR
WRITE = (
    READ | WRITE_FILE | TRUNCATE | MAKE_DIR | MAKE_FILE | MAKE_SYMLINK | REMOVE_DIR | REMOVE_FILE | REFER
)  # fmt: skip
DEVICE = READ | WRITE_FILE | DEVICE_COMMAND

# Libraries of the system, and its information about itself. Memory, environment and descriptors of
# processes outside stay closed although they are below /proc, and so does all that needs writing.
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/gnu/store", "/proc")
HARDWARE = (
    "/sys/devices", "/sys/bus", "/sys/class", "/sys/module", "/sys/fs/cgroup", "/sys/kernel/mm"
)  # fmt: skip
CONFIGURATION = (
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/timezone",
    "/etc/nsswitch.conf", "/etc/passwd", "/etc/group", "/etc/os-release", "/etc/ssl/openssl.cnf",
    "/etc/ssl/certs", "/etc/pki/tls/openssl.cnf",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Patterns below /dev, without which no GPU can be used.
ACCELERATORS = ("nvidia*", "nvidia-caps/*", "dri/render*", "kfd", "dxg")
NVIDIA_DRIVER = Path("/dev/nvidiactl")
# The names of this process's threads are files below it. CUDA refuses to start if it cannot name its own.
OWN_PROCESS = Path("/proc/self")

PACKAGE = Path(__file__).parents[1]


class NoLandlock(Exception):
    """The kernel has no Landlock, or it is turned off."""


@dataclass(frozen=True)
class Places:
    """Files and folders that a worker may use, in addition to those that every Python program needs."""

    readable: tuple[Path, ...] = field(default=())
    writable: tuple[Path, ...] = field(default=())
    # Whether it may use the GPUs of the machine.
    uses_gpus: bool = False

    @property
    def uses_cuda(self) -> bool:
        """Whether it needs the rights without which CUDA does not start."""
        return self.uses_gpus and NVIDIA_DRIVER.exists()


def version() -> int:
    """Return the version of the kernel's Landlock interface. Raises `NoLandlock`."""
    try:
        return system_call(CREATE_RULESET, None, 0, ASK_FOR_VERSION)
    except OSError as error:
        raise NoLandlock(f"the kernel has no Landlock: {_name(error)}") from None


def confine(places: Places) -> int:
    """Restrict the calling thread to these files; return the version of Landlock. Raises `NoLandlock`.

    `PR_SET_NO_NEW_PRIVS` must be set. Call it while there is no other thread.
    """
    known = version()
    rights = 0
    for since, brought in KNOWN_SINCE.items():
        rights |= brought if since <= known else 0
    attributes = struct.pack("=QQQ", rights, BIND_AND_CONNECT_TCP, ABSTRACT_SOCKETS_AND_SIGNALS)
    size = 8 if known < 4 else 16 if known < 6 else 24
    try:
        ruleset = system_call(
            CREATE_RULESET, ctypes.create_string_buffer(attributes, size), size, 0
        )
        try:
            for path, wanted in _rules(places):
                _allow(ruleset, path, wanted & rights)
            system_call(RESTRICT_SELF, ruleset, 0)
        finally:
            os.close(ruleset)
    except OSError as error:
        raise NoLandlock(f"the kernel refused Landlock: {_name(error)}") from None
    return known


def _rules(places: Places) -> Iterable[tuple[Path, int]]:
    """The allowed files and folders with their access rights."""
    # A worker starts Python itself, by the loader that the kernel starts it with, and no other program.
    loaders = (
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.rpartition("/")[2].startswith(("ld-", "ld."))
    )
    for program in {Path(sys.executable).resolve(), *map(Path, loaders)}:
        yield program, EXECUTE | READ_FILE
    # Not by the settings: reading them would take longer than all of this.
    variables = [os.environ.get(name, "") for name in ("PYTHONPATH", "LD_LIBRARY_PATH")]  # noqa: TID251
    named = {Path(name) for name in ":".join(variables).split(":") if name.startswith("/")}
    prefixes = (sys.prefix, sys.base_prefix, sys.base_exec_prefix)
    # The folder around this package may be a checkout with data, so the package alone is readable. That folder can
    # only be listed, which a child process of a worker needs to find the package.
    python = {PACKAGE, *(named - {PACKAGE.parent}), *map(Path, prefixes)}
    yield PACKAGE.parent, READ_DIR
    yield from ((path, READ) for path in (*python, *map(Path, (*SYSTEM, *HARDWARE))))
    yield from ((Path(path), READ) for path in CONFIGURATION)
    yield from ((Path(path), DEVICE) for path in DEVICES)
    if places.uses_gpus:
        devices = [Path("/dev").glob(pattern) for pattern in ACCELERATORS]
        yield from ((path, DEVICE) for found in devices for path in found)
    if places.uses_cuda:
        yield OWN_PROCESS, READ | WRITE_FILE | TRUNCATE
    for path in places.readable:
        yield path, READ
        # A model from a hub's cache is a folder of links to files elsewhere.
        links = (file for file in path.iterdir() if file.is_symlink()) if path.is_dir() else ()
        yield from ((link.resolve(), READ_FILE) for link in links)
    yield from ((path, WRITE) for path in places.writable)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a file that is missing or not readable needs no rule
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= OF_FILES
        rule = struct.pack("=Qi", rights, place)
        system_call(
            ADD_RULE, ruleset, PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0
        )
    finally:
        os.close(place)


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "unknown")
