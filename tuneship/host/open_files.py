"""The limit of open files, and how many of them may be connections of callers."""

import errno
import resource

from tuneship.settings import AddressSettings

# Descriptors for everything but callers: 48 database connections (three files each on SQLite), uploads, workers,
# webhooks, libraries that open files for a moment, and a burst of connections that are being closed.
RESERVED_FILES = 512
# More would cost memory (about 40 KB each, 100 KB with TLS) and be of no use on the usual machine.
MAX_CONNECTIONS = 4096


class NotEnoughFiles(OSError):
    """The limit of open files is too low for the connections that the settings allow."""


def raise_file_limit() -> int:
    """Raise the limit of open files as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # E.g. macOS, which calls the hard limit unlimited and refuses to set that.
            return soft
    return hard


def connection_limit(settings: AddressSettings, open_files: int) -> int:
    """The number of open connections that the settings allow; by default, what the limit of open files allows.

    Raises NotEnoughFiles.
    """
    room = open_files - min(RESERVED_FILES, open_files // 2)
    if open_files == resource.RLIM_INFINITY:
        room = MAX_CONNECTIONS
    limit = settings.maximum_connections or min(room, MAX_CONNECTIONS)
    if limit > max(room, 0):
        text = (
            f"TUNESHIP_MAXIMUM_CONNECTIONS is {limit}, but a limit of {open_files} open files leaves room for"
            f" {room}: raise the limit (LimitNOFILE, ulimit -Hn) or lower the setting"
        )
        raise NotEnoughFiles(errno.EMFILE, text)
    return limit
