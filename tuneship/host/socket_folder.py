"""A short folder for Unix sockets, since the path of the data directory may be too long for one."""

import os
from collections.abc import Sequence

# The path of a Unix socket may have 107 bytes (man 7 unix); this leaves room for the name of the file.
MAX_FOLDER_LENGTH = 75
USUAL = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - callers make a private folder there


def socket_folder(*preferred: str, usual: Sequence[str] = USUAL) -> str:
    """Return the first folder that is writable and has a short path: one of `preferred`, else of `usual`.

    Raises `OSError` where there is none.
    """
    for folder in (*preferred, *usual):
        if len(os.fsencode(folder)) <= MAX_FOLDER_LENGTH and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise OSError("no writable folder has a path that is short enough for a Unix socket")
