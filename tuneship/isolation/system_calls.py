"""The filter of a worker's system calls (seccomp), in the kernel's own format (BPF).

It is written here because a Python library for it needs another one of the operating system. It refuses the calls by
which a process communicates with others, inspects them, changes its rights, or reaches files that no rule of Landlock
covers; some are refused for certain arguments only. All others are allowed: those of a numerical library differ by
machine, device and version.
"""

import errno
import struct

ALLOW, REFUSE, UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY, MASK, RETURN = (
    0x20,
    0x15,
    0x35,
    0x45,
    0x54,
    0x06,
)
# Offsets in `struct seccomp_data` of the call's number, the architecture and six arguments of eight
# bytes.
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
# From here on the numbers are a second numbering of the same calls (x86-64 only).
X32 = 0x4000_0000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Code, number of instructions to skip when true and when false, operand.
Instruction = tuple[int, int, int, int]

# Refused calls by their numbers on x86-64 and on arm64; None: the processor has no such call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Sockets. A connected pair is allowed (below); its ends are written to like files.
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200),
    "listen": (50, 201), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # Rings of calls, which no filter sees.
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "perf_event_open": (298, 241),
    "ioprio_set": (251, 30),
    # Memory and messages under names shared by all processes.
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    # The kernel's keys, its programs and its own state.
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "userfaultfd": (323, 282), "syslog": (103, 116), "acct": (163, 89), "reboot": (169, 142),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "vhangup": (153, 58), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    # Namespaces and mounts.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    # Changes of files that Landlock does not restrict.
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "truncate": (76, 45),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
}  # fmt: skip

UNIX, STREAM, SEQUENCED = 1, 1, 5
# Mask of a socket's type without its two flags.
ANY_BUT_CLOSE_AND_NONBLOCK = 0xFFFF_FFFF ^ 0o2004000
# Flags of `clone` that make new namespaces.
NAMESPACES = 0x7E02_0000
# Commands of `fcntl` after which the kernel signals a chosen process on behalf of this one.
SET_OWNER = (8, 15)
# Typing into a terminal (two), the owner of a socket (two), the flags of a file (two).
IOCTLS = (0x5412, 0x541C, 0x8901, 0x8902, 0x4008_6602, 0x401C_5820)
QUERY = 0xFFFF_FFFF


def low(argument: int) -> Instruction:
    """Make the instruction that loads the lower half of an argument, counted from 0."""
    return LOAD, 0, 0, ARGUMENTS_AT + 8 * argument


def high(argument: int) -> Instruction:
    """Make the instruction that loads the upper half of an argument."""
    return LOAD, 0, 0, ARGUMENTS_AT + 8 * argument + 4


def only_if(*tests: tuple[Instruction, int]) -> list[Instruction]:
    """Allow the call if each loaded value equals its expected value, otherwise refuse it."""
    code: list[Instruction] = []
    for at, (load, value) in enumerate(tests):
        code += [load, (JUMP_IF_EQUAL, 0, 2 * (len(tests) - at) - 1, value)]
    return [*code, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]


def unless(load: Instruction, values: tuple[int, ...]) -> list[Instruction]:
    """Refuse the call if the loaded value is one of these, otherwise allow it."""
    last = len(values)
    tests = [(JUMP_IF_EQUAL, last - at, 0, value) for at, value in enumerate(values)]
    return [load, *tests, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]


# Allow calls whose first argument, a process, is 0: the calling one.
ON_ITSELF = only_if((low(0), 0))
# Calls refused for certain arguments: numbers on x86-64 and on arm64, and the instructions that decide.
CONDITIONAL: dict[str, tuple[int, int, list[Instruction]]] = {
    # Allowed without an address: even a connected datagram socket would send to any listener with one.
    "sendto": (44, 206, only_if((low(4), 0), (high(4), 0))),
    "socketpair": (53, 199, [
        low(0), (JUMP_IF_EQUAL, 0, 4, UNIX),
        low(1), (MASK, 0, 0, ANY_BUT_CLOSE_AND_NONBLOCK), (JUMP_IF_EQUAL, 0, 1, STREAM),
        (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE),
    ]),
    "clone": (56, 220, [
        low(0), (JUMP_IF_ANY, 1, 0, NAMESPACES), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)
    ]),
    # Its flags are in memory, which a filter cannot read; libraries fall back to `clone`.
    "clone3": (435, 435, [(RETURN, 0, 0, UNKNOWN)]),
    "prlimit64": (302, 261, ON_ITSELF), "sched_setaffinity": (203, 122, ON_ITSELF),
    "sched_setscheduler": (144, 119, ON_ITSELF), "sched_setparam": (142, 118, ON_ITSELF),
    "sched_setattr": (314, 274, ON_ITSELF), "migrate_pages": (256, 238, ON_ITSELF),
    "move_pages": (279, 239, ON_ITSELF), "setpriority": (141, 140, only_if((low(0), 0), (low(1), 0))),
    "fcntl": (72, 25, unless(low(1), SET_OWNER)), "ioctl": (16, 29, unless(low(1), IOCTLS)),
    "utimensat": (280, 88, only_if((low(1), 0), (high(1), 0))),
    "personality": (135, 92, only_if((low(0), QUERY))),
}  # fmt: skip
# CUDA starts only if it can listen on a Unix socket, on which other processes could ask it to share memory. Nobody gets
# through to it: a call that connects to it, or accepts a connection, is refused.
OF_CUDA: dict[str, list[Instruction]] = {
    "socket": [
        low(0), (JUMP_IF_EQUAL, 0, 5, UNIX),
        low(1), (MASK, 0, 0, ANY_BUT_CLOSE_AND_NONBLOCK),
        (JUMP_IF_EQUAL, 1, 0, STREAM), (JUMP_IF_EQUAL, 0, 1, SEQUENCED),
        (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE),
    ],
    "bind": [(RETURN, 0, 0, ALLOW)], "listen": [(RETURN, 0, 0, ALLOW)],
}  # fmt: skip
SIGNALS: dict[str, tuple[int, int]] = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip


def instructions(
    machine: str, only_signals_to: int | None = None, *, uses_cuda: bool = False
) -> list[Instruction]:
    """Make the filter for a processor. Raises `ValueError` for one that is not in `ARCHITECTURES`.

    `only_signals_to`: the only process that may get signals, for kernels whose Landlock does not restrict them.
    `uses_cuda`: allow what `OF_CUDA` says.
    """
    which = list(ARCHITECTURES).index(machine)
    refuse = [(RETURN, 0, 0, REFUSE)]
    allowed = OF_CUDA if uses_cuda else {}
    blocks = [(both[which], allowed.get(name, refuse)) for name, both in REFUSED.items()]
    blocks += [((first, second)[which], code) for first, second, code in CONDITIONAL.values()]
    if only_signals_to is not None:
        own = only_if((low(0), only_signals_to))
        blocks += [(both[which], own) for both in SIGNALS.values()]
    return [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_IF_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_IF_AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, REFUSE),
        *(
            instruction
            for number, code in blocks
            if number is not None
            for instruction in ((JUMP_IF_EQUAL, 0, len(code), number), *code)
        ),
        (RETURN, 0, 0, ALLOW),
    ]


def packed(code: list[Instruction]) -> bytes:
    """Pack instructions in the kernel's format."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
