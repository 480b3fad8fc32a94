"""Tells systemd how the service is, where it asks for that (`Type=notify`, `WatchdogSec=`)."""

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send a state, e.g. `READY=1`; nothing happens where nobody listens."""
    address = os.environ.get("NOTIFY_SOCKET")  # noqa: TID251 - systemd's own
    if not address:
        return
    # An address that begins with @ is in the abstract namespace.
    place = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), place)
