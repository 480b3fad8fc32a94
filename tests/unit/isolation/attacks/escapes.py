"""Attacks on the isolation of a worker, by name: sockets, files, rights, services of the kernel.

`intrusion.py` attempts them.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.unit.isolation.attacks.intrusion_calls import REFUSED_BY, call, reaches, refuse
from tests.unit.isolation.attacks.intrusion_targets import DECOY, Targets
from tuneship.isolation.kernel import system_call
from tuneship.isolation.system_calls import X32

NEW_USERS, NEW_NETWORK, CHILD_ENDED = 0x1000_0000, 0x4000_0000, int(signal.SIGCHLD)
FAMILIES, KINDS = range(1, 46), (1, 2, 3, 4, 5, 6, 10)


# Communication.


def _connect(family: int, address: "str | tuple[str, int]", kind: int = socket.SOCK_STREAM) -> None:
    with socket.socket(family, kind) as made:
        made.settimeout(2)
        made.connect(address)


def _datagram(target: str, *, by: str) -> None:
    """Send from one end of a connected pair to a listener that it is not connected to."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        if by == "sendto":
            one.sendto(b"text", target)
        elif by == "sendmsg":
            one.sendmsg([b"text"], [], 0, target)
        elif by == "connect":
            one.connect(target)
            one.send(b"text")
        else:
            reaches("sendmmsg", one.fileno(), ctypes.create_string_buffer(64), 1, 0)


def _address_on_own_line(_: Targets) -> None:
    """Send to an address over a connected stream, which must be refused for the address."""
    one, other = socket.socketpair()
    with one, other:
        reaches("sendto", one.fileno(), b"text", 4, 0, b"\1\0/", 3)


def _pass_descriptor(_: Targets) -> None:
    one, other = socket.socketpair()
    with one, other:
        socket.send_fds(one, [b"x"], [0])


def _any_socket(_: Targets) -> None:
    """Open a socket of any family and kind."""
    for family in FAMILIES:
        for kind in KINDS:
            with suppress(OSError), socket.socket(family, kind, 0):
                return
    refuse(when=True)


def _in_thread(targets: Targets) -> None:
    made: list[bool] = []

    def connect() -> None:
        with suppress(OSError):
            _connect(socket.AF_INET, ("127.0.0.1", targets.tcp))
            made.append(True)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    refuse(when=not made)


def _in_program(targets: Targets) -> None:
    program = f"import socket; socket.create_connection(('127.0.0.1', {targets.tcp}), 2)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], stderr=subprocess.DEVNULL, check=False
    )
    refuse(when=done.returncode != 0)


def _by_32_bits(_: Targets) -> None:
    """Call `getpid` by the interrupt of 32-bit programs, whose call numbers are different."""
    refuse(when=platform.machine() != "x86_64")
    code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20; int 0x80; ret
    page = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    child = os.fork()
    if child == 0:
        function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        os._exit(0 if function() == os.getpid() else 1)
    refuse(when=os.waitpid(child, 0)[1] != 0)


def _clone(name: str) -> None:
    arguments: tuple[object, ...] = (NEW_USERS | CHILD_ENDED, 0, 0, 0, 0)
    if name == "clone3":
        fields = struct.pack("=8Q", NEW_USERS, 0, 0, 0, CHILD_ENDED, 0, 0, 0)
        arguments = (ctypes.create_string_buffer(fields, 64), 64)
    if call(name, *arguments) == 0:
        os._exit(0)


# Files.


def _read(path: str) -> None:
    with Path(path).open("rb") as file:
        file.read(1)


def _open_to_write(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))


def _make_in(folder: str) -> None:
    """Make a file without a name, so that a success leaves nothing behind."""
    os.close(os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o600))


def _decoy(targets: Targets) -> str:
    return f"{targets.decoys}/{DECOY}"


def _own(name: str) -> str:
    return f"{tempfile.gettempdir()}/{name}-{os.getpid()}"


def _move_back_and_forth(targets: Targets) -> None:
    moved = Path(_decoy(targets)).rename(_decoy(targets) + "-moved")
    moved.rename(_decoy(targets))


def _remove(targets: Targets) -> None:
    Path(_decoy(targets)).unlink()
    Path(_decoy(targets)).write_text("decoy")


def _link_to_own(targets: Targets) -> None:
    os.link(_decoy(targets), _own("link"))
    Path(_own("link")).unlink()


def _link_in_their_place(targets: Targets) -> None:
    link = Path(targets.decoys, "link")
    link.symlink_to("/")
    link.unlink()


def _read_by_link(targets: Targets) -> None:
    link = Path(_own("symlink"))
    link.symlink_to(_decoy(targets))
    try:
        _read(str(link))
    finally:
        link.unlink()


def _each(paths: tuple[str, ...], attempt: Callable[[str], object]) -> None:
    """Attempt it on each path; one success is enough."""
    for path in paths:
        with suppress(OSError):
            attempt(path)
            return
    refuse(when=True)


def _change_open_file(_: Targets) -> None:
    with Path(os.__file__).open("rb") as file:
        os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o7777)


def _watch(targets: Targets) -> None:
    made = ctypes.CDLL(None).inotify_init()
    call("inotify_add_watch", made, _decoy(targets).encode(), 0x20)


def _times(targets: Targets) -> None:
    status = Path(_decoy(targets)).stat()
    os.utime(_decoy(targets), ns=(status.st_atime_ns, status.st_mtime_ns))


def _handle(_: Targets) -> None:
    """Open a file by its handle, without any folder; allowed, it would fail with EBADF."""
    reaches("open_by_handle_at", -1, ctypes.create_string_buffer(16), 0)


# Its own rights.


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0], 16)


def _unexpected_descriptor(targets: Targets) -> None:
    listed = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    for number in {*listed} - {0, 1, 2, *targets.descriptors}:
        with suppress(OSError):  # the listed folder itself is closed by now
            os.fstat(number)
            return
    refuse(when=True)


def _run_shell(_: Targets) -> None:
    subprocess.run(["/bin/sh", "-c", ":"], check=True)


def _host_name(_: Targets) -> None:
    name = socket.gethostname().encode()
    call("sethostname", name, len(name))


def _join_network(_: Targets) -> None:
    with Path("/proc/self/ns/net").open("rb") as own:
        call("setns", own.fileno(), 0)


def _typed(_: Targets) -> None:
    """Type into a pipe as if it were a terminal; allowed, it would fail with ENOTTY."""
    reading, writing = os.pipe()
    os.close(writing)
    try:
        fcntl.ioctl(reading, 0x5412, b"x")
    except OSError as error:
        refuse(when=error.errno in REFUSED_BY)


ON_TARGETS: dict[str, Callable[[Targets], object]] = {
    # Sockets.
    "TCP": lambda t: _connect(socket.AF_INET, ("127.0.0.1", t.tcp)),
    "TCP over IPv6": lambda t: _connect(socket.AF_INET6, ("::1", t.tcp6 or 9)),
    "UDP": lambda t: _connect(socket.AF_INET, ("127.0.0.1", t.udp), socket.SOCK_DGRAM),
    "listening": lambda _: socket.create_server(("127.0.0.1", 0)).close(),
    "Unix socket": lambda t: _connect(socket.AF_UNIX, t.unix),
    "abstract Unix socket": lambda t: _connect(socket.AF_UNIX, t.abstract),
    "Unix datagram socket": lambda t: _connect(socket.AF_UNIX, t.unix_datagram, socket.SOCK_DGRAM),
    "datagram pair, sendto a path": lambda t: _datagram(t.unix_datagram, by="sendto"),
    "datagram pair, sendto an abstract name": lambda t: _datagram(t.abstract_datagram, by="sendto"),
    "datagram pair, sendmsg": lambda t: _datagram(t.unix_datagram, by="sendmsg"),
    "datagram pair, sendmmsg": lambda t: _datagram(t.unix_datagram, by="sendmmsg"),
    "datagram pair, connect": lambda t: _datagram(t.unix_datagram, by="connect"),
    "sequenced packet pair": lambda _: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET),
    "sendto an address on a stream pair": _address_on_own_line,
    "passing a descriptor": _pass_descriptor,
    "netlink": lambda _: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close(),
    "packet socket": lambda _: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close(),
    "raw socket": lambda _: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(),
    "VM socket": lambda _: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close(),
    "kernel crypto socket": lambda _: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET).close(),
    "any family and kind of socket": _any_socket,
    "TCP from another thread": _in_thread,
    "TCP from a further program": _in_program,
    "named pipe": lambda t: _open_to_write(t.fifo),
    "32-bit system calls": _by_32_bits,
    "x32 system calls": lambda _: system_call(X32 | 39),
    "io_uring": lambda _: call("io_uring_setup", 4, ctypes.create_string_buffer(120)),
    "io_uring, entering": lambda _: reaches("io_uring_enter", -1, 0, 0, 0, 0, 0),
    # What the kernel keeps for all.
    "session keyring": lambda _: call("keyctl", 0, -3, 0),
    "adding a key": lambda _: call("add_key", b"user", b"tuneship", b"x", 1, -2),
    "asking for a key": lambda _: reaches("request_key", b"user", b"tuneship", 0, 0),
    "System V shared memory": lambda _: reaches("shmget", 0x7473, 1, 0),
    "System V semaphores": lambda _: reaches("semget", 0x7473, 1, 0),
    "System V messages": lambda _: reaches("msgget", 0x7473, 0),
    "POSIX message queue": lambda _: reaches("mq_open", b"tuneship", 0, 0, 0),
    "POSIX shared memory of another": lambda t: _read(t.shared_memory),
    "new POSIX shared memory": lambda _: _make_in("/dev/shm"),  # noqa: S108 - the target
    "BPF": lambda _: reaches("bpf", 0, ctypes.create_string_buffer(72), 72),
    "performance events": lambda _: reaches("perf_event_open", ctypes.create_string_buffer(128), 0, -1, -1, 0),
    "userfaultfd": lambda _: call("userfaultfd", 0),
    "fanotify": lambda _: call("fanotify_init", 0, 0),
    "kernel log": lambda _: call("syslog", 10, 0, 0),
    "kernel module": lambda _: reaches("finit_module", -1, b"", 0),
    "kernel module by memory": lambda _: reaches("init_module", 0, 0, b""),
    "another kernel": lambda _: reaches("kexec_load", 0, 0, 0, 0xFFFF),
    "reboot": lambda _: reaches("reboot", 0, 0, 0, 0),
    "accounting": lambda _: reaches("acct", b"/nonexistent"),
    "swap": lambda _: reaches("swapon", b"/nonexistent", 0),
    "clock": lambda _: call("settimeofday", 0, 0),
    "name of the host": _host_name,
    "ports of the processor": lambda _: call("iopl", 3),
    "personality": lambda _: call("personality", 0x0040000),
    # Namespaces and mounts.
    "new user namespace": lambda _: call("unshare", NEW_USERS),
    "new network namespace": lambda _: call("unshare", NEW_NETWORK),
    "new user namespace by clone": lambda _: _clone("clone"),
    "new user namespace by clone3": lambda _: _clone("clone3"),
    "joining a namespace": _join_network,
    "mount": lambda _: reaches("mount", b"none", b"/nonexistent", b"tmpfs", 0, 0),
    "unmount": lambda _: reaches("umount2", b"/nonexistent", 0),
    "mount by fsopen": lambda _: call("fsopen", b"tmpfs", 0),
    "mount by open_tree": lambda _: call("open_tree", -100, b"/", 1),
    "attributes of a mount": lambda _: reaches("mount_setattr", -1, b"", 0, 0, 0),
    "pivot_root": lambda _: reaches("pivot_root", b"/nonexistent", b"/nonexistent"),
    "chroot": lambda _: call("chroot", b"/"),
    # Files.
    "reading a secret": lambda t: _each(t.secrets, _read),
    "writing to a secret": lambda t: _each(t.secrets, _open_to_write),
    "listing the data directory": lambda t: _each(t.folders, os.listdir),
    "reading another's file": lambda t: _read(_decoy(t)),
    "reading another's file by a link": _read_by_link,
    "writing another's file": lambda t: _open_to_write(_decoy(t)),
    "cutting another's file off": lambda t: call("truncate", _decoy(t).encode(), 5),
    "changing another's file's mode": lambda t: Path(_decoy(t)).chmod(0o600),
    "changing another's file's owner": lambda t: os.chown(_decoy(t), os.getuid(), os.getgid()),
    "changing another's file's times": _times,
    "changing another's file's attributes": lambda t: os.setxattr(_decoy(t), b"user.x", b"x"),
    "changing a file that may be read": _change_open_file,
    "moving another's file": _move_back_and_forth,
    "removing another's file": _remove,
    "linking another's file": _link_to_own,
    "a link in another's folder": _link_in_their_place,
    "making a file in another's folder": lambda t: _make_in(t.decoys),
    "watching another's file": _watch,
    "opening by handle": _handle,
    "writing to /tmp": lambda _: _make_in("/tmp"),  # noqa: S108 - the target
    "writing to /var/tmp": lambda _: _make_in("/var/tmp"),  # noqa: S108 - the target
    "writing to the home folder": lambda _: _make_in(str(Path.home())),
    "a job for cron": lambda _: _each(("/etc/cron.d", "/var/spool/cron", "/etc"), _make_in),
    "writing into this program": lambda _: _open_to_write(__file__),
    "writing into Python": lambda _: _open_to_write(os.__file__),
    "password hashes": lambda _: _read("/etc/shadow"),
    "terminal": lambda _: _open_to_write("/dev/tty"),
    "new terminal": lambda _: os.openpty(),
    "typing into a terminal": _typed,
    "memory of the machine": lambda _: _each(("/dev/mem", "/dev/port", "/dev/kmsg"), _read),
    "disk": lambda _: _each(("/dev/vda", "/dev/sda", "/dev/nvme0n1"), _read),
    "the host's core handler": lambda _: _open_to_write("/proc/sys/kernel/core_pattern"),
    "the host's emergency keys": lambda _: _open_to_write("/proc/sysrq-trigger"),
    "the host's resource groups": lambda _: _open_to_write("/sys/fs/cgroup/cgroup.procs"),
    # Its own rights.
    "inherited descriptors": _unexpected_descriptor,
    "capabilities": lambda _: refuse(when=_status("CapEff") == 0),
    "rights of set-user-id programs": lambda _: refuse(when=_status("NoNewPrivs") == 1),
    "programs of the system": _run_shell,
}  # fmt: skip
