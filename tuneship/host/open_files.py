"""How many files this process may have open, and how many of them may be connections of callers."""

import errno
import resource
from dataclasses import dataclass

from tuneship.settings import ServiceSettings

# Descriptors kept for everything but callers: 48 database connections (three files each on
# SQLite), uploads, workers, webhooks, libraries that open files for a moment, and a burst of
# connections that are being closed.
RESERVE = 512
# More would cost memory on the usual machine (about 40 KB each, 100 KB with TLS) and serve
# nobody.
MOST_CONNECTIONS = 4096


class NotEnoughFiles(OSError):
    """The limit of open files leaves no room for the connections that the settings ask for."""


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections the service keeps open."""

    together: int
    each: int
    """From one address."""


def raise_file_limit() -> int:
    """Raise the limit of open files as far as the system lets us, and answer what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (
            OSError,
            ValueError,
        ):  # e.g. macOS, which calls it unlimited and refuses to set that
            return soft
    return hard


def connection_limits(settings: ServiceSettings, open_files: int) -> ConnectionLimits:
    """What the settings ask for; by default, what fits below the limit of open files. Raises `NotEnoughFiles`."""
    room = open_files - min(RESERVE, open_files // 2)
    if open_files == resource.RLIM_INFINITY:
        room = MOST_CONNECTIONS
    together = settings.maximum_connections or min(room, MOST_CONNECTIONS)
    if together > max(room, 0):
        text = (
            f"TUNESHIP_MAXIMUM_CONNECTIONS is {together}, but a limit of {open_files} open files leaves room for"
            f" {room}: raise the limit (LimitNOFILE, ulimit -Hn) or lower the setting"
        )
        raise NotEnoughFiles(errno.EMFILE, text)
    each = settings.maximum_connections_per_address or max(1, together // 2)
    return ConnectionLimits(together, min(each, together))
